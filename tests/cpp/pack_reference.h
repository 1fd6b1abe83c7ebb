// A slow, simple reference for the pack kernels: it rounds by arithmetic on doubles instead of bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "kernels/kernel_table.h"
#include "kernels/pack.h"

namespace torchddp::kernels::reference {

using Bytes = std::vector<unsigned char>;
using Floats = std::vector<float>;

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline constexpr DType kFloatTypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};

// All pairs.
inline std::vector<std::pair<DType, DType>> float_pairs() {
  std::vector<std::pair<DType, DType>> pairs;
  for (const DType one : kFloatTypes) {
    for (const DType other : kFloatTypes) pairs.emplace_back(one, other);
  }
  return pairs;
}

// A 16-bit format: sign, exponent, `mantissa_bits` of mantissa.
struct Format {
  int mantissa_bits;
  int min_exponent;  // of normal numbers
  int max_exponent;
};

inline Format format_of(DType dtype) { return dtype == DType::kF16 ? Format{10, -14, 15} : Format{7, -126, 127}; }

inline double decode(uint16_t bits, Format format) {
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits & 0x7FFF) >> format.mantissa_bits;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == format.max_exponent - format.min_exponent + 2) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, format.min_exponent - format.mantissa_bits);
  return sign *
         std::ldexp(mantissa + (1 << format.mantissa_bits), exponent - 1 + format.min_exponent - format.mantissa_bits);
}

// Rounds to nearest, ties to even (the rounding mode of nearbyint).
inline uint16_t encode(double value, Format format) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  const auto infinity = static_cast<uint16_t>((format.max_exponent - format.min_exponent + 2) << format.mantissa_bits);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | infinity | (1 << (format.mantissa_bits - 1)));
  if (magnitude == 0) return sign;
  if (std::isinf(value)) return sign | infinity;
  const int exponent = std::max(std::ilogb(magnitude), format.min_exponent);
  // In units of the last place; less than 2^mantissa_bits only for denormals.
  const auto units = static_cast<int64_t>(std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent)));
  const int64_t bits = ((static_cast<int64_t>(exponent) - format.min_exponent) << format.mantissa_bits) + units;
  return static_cast<uint16_t>(sign | std::min<int64_t>(bits, infinity));
}

// Element `index` as a double, which represents every type exactly.
inline double get(const unsigned char* data, DType dtype, int64_t index) {
  if (dtype == DType::kF64) {
    double value;
    std::memcpy(&value, data + index * 8, 8);
    return value;
  }
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, data + index * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, data + index * 2, 2);
  return decode(bits, format_of(dtype));
}

inline void set(unsigned char* data, DType dtype, int64_t index, double value) {
  if (dtype == DType::kF64) {
    std::memcpy(data + index * 8, &value, 8);
    return;
  }
  const auto narrow = static_cast<float>(value);
  if (dtype == DType::kF32) {
    std::memcpy(data + index * 4, &narrow, 4);
    return;
  }
  const uint16_t bits = encode(narrow, format_of(dtype));
  std::memcpy(data + index * 2, &bits, 2);
}

// One element. The product of two floats is exact in double, so the cast back rounds once, like a product in float.
inline void scale_cast_one(unsigned char* dst, DType dst_type, int64_t dst_index, const unsigned char* src,
                           DType src_type, int64_t src_index, double scale) {
  if (dst_type == src_type && scale == 1.0) {
    const int64_t bytes = item_size(src_type);
    std::memcpy(dst + dst_index * bytes, src + src_index * bytes, static_cast<size_t>(bytes));
    return;
  }
  const double value = get(src, src_type, src_index);
  const bool in_double = dst_type == DType::kF64 || src_type == DType::kF64;
  const double product =
      in_double ? value * scale : static_cast<double>(static_cast<float>(value * static_cast<float>(scale)));
  set(dst, dst_type, dst_index, product);
}

// Equal bits, or NaN where NaN is expected (another test checks NaNs' sign and payload).
inline bool same_element(const unsigned char* actual, const unsigned char* expected, DType dtype, int64_t index) {
  const int64_t bytes = item_size(dtype);
  if (std::memcmp(actual + index * bytes, expected + index * bytes, static_cast<size_t>(bytes)) == 0) return true;
  return is_float(dtype) && std::isnan(get(actual, dtype, index)) && std::isnan(get(expected, dtype, index));
}

// The index of the first element that differs, or -1.
inline int64_t first_difference(const unsigned char* actual, const unsigned char* expected, DType dtype,
                                int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    if (!same_element(actual, expected, dtype, i)) return i;
  }
  return -1;
}

inline bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

inline Bytes random_bytes(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes data(static_cast<size_t>(size));
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(random());
  return data;
}

// Data after `misalignment` bytes, at the end of its allocation, so that ASan detects reads past it.
inline Bytes shifted_by(const Bytes& data, size_t misalignment) {
  Bytes shifted(misalignment);
  shifted.insert(shifted.end(), data.begin(), data.end());
  shifted.shrink_to_fit();
  return shifted;
}

// Every 16-bit number.
inline std::vector<uint16_t> all_halves() {
  std::vector<uint16_t> halves(65536);
  std::iota(halves.begin(), halves.end(), uint16_t{0});
  return halves;
}

// The expected output of `scale_cast`.
inline Bytes scale_cast(DType dst_type, const unsigned char* source, DType src_type, int64_t numel, double scale) {
  Bytes expected(static_cast<size_t>(numel * item_size(dst_type)));
  for (int64_t i = 0; i < numel; ++i) scale_cast_one(expected.data(), dst_type, i, source, src_type, i, scale);
  return expected;
}

// Ordinary values, mixed with special values and random bit patterns.
inline Bytes random_elements(DType dtype, int64_t numel, uint32_t seed) {
  Bytes data = random_bytes(numel * item_size(dtype), seed);
  if (!is_float(dtype)) return data;
  std::mt19937 random(seed + 1);
  const double specials[] = {
      0.0,      -0.0,    INFINITY,  -INFINITY, NAN,      65504,    65519,    65520,
      0x1p-24,  0x1p-25, 0x1.8p-25, 0x1p-14,   0x1p-126, 0x1p-133, 0x1p-149, 3.4028234663852886e38,
      0x1p-1074};
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t choice = random() % 8;
    if (choice == 0) set(data.data(), dtype, i, specials[random() % std::size(specials)]);
    if (choice > 1) set(data.data(), dtype, i, std::ldexp(static_cast<double>(random()) - 0x1p31, -34));
  }
  return data;
}

}  // namespace torchddp::kernels::reference
