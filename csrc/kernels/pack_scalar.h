// One element at a time: the conversions every instruction set must agree with, bit for bit.
//
// Everything here is always inlined. The kernels that include this are compiled for different instruction sets, and an
// out-of-line copy shared by the linker could hold instructions that the processor lacks.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/pack.h"

#define TDDP_ALWAYS_INLINE __attribute__((always_inline)) inline

namespace torchddp::kernels {

constexpr int64_t float_item_size(DType dtype) { return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2; }

// The type in which the product is formed.
template <DType Dst, DType Src>
using Product = std::conditional_t<Dst == DType::kF64 || Src == DType::kF64, double, float>;

TDDP_ALWAYS_INLINE float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Round to nearest even; a NaN becomes quiet and keeps its sign and upper payload. Not the processor's own instruction
// (vcvtneps2bf16), which flushes denormals to zero.
TDDP_ALWAYS_INLINE uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
}

TDDP_ALWAYS_INLINE float f16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00u) {  // infinity, or NaN made quiet
    const uint32_t quiet = magnitude > 0x7C00u ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7F800000u | (magnitude << 13) | quiet);
  }
  if (magnitude < 0x400u) {  // zero and denormals: a small integer times 2^-24, exact
    const float value = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));  // exponent bias 15 -> 127
}

// Round to nearest even; a NaN becomes quiet and keeps its sign and upper payload, as vcvtps2ph does.
TDDP_ALWAYS_INLINE uint16_t float_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
  } else if (magnitude >= 0x47800000u) {  // 65536 and above: infinity
    half = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves multiples of 2^-24, rounded by the adder
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {  // exponent bias 127 -> 15; a carry out of the mantissa steps the exponent, up to infinity, as it should
    half = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

// Loads and stores go through memcpy: views of mixed types may leave elements unaligned.
template <DType Src, class T>
TDDP_ALWAYS_INLINE T load_as(const unsigned char* src) {
  if constexpr (Src == DType::kF64) {
    double value;
    std::memcpy(&value, src, sizeof(value));
    return static_cast<T>(value);
  } else if constexpr (Src == DType::kF32) {
    float value;
    std::memcpy(&value, src, sizeof(value));
    return static_cast<T>(value);
  } else {
    uint16_t bits;
    std::memcpy(&bits, src, sizeof(bits));
    return static_cast<T>(Src == DType::kF16 ? f16_to_float(bits) : bf16_to_float(bits));
  }
}

// A double goes to a 16-bit type by way of float, as in torch.
template <DType Dst, class T>
TDDP_ALWAYS_INLINE void store_as(unsigned char* dst, T value) {
  if constexpr (Dst == DType::kF64) {
    const double wide = static_cast<double>(value);
    std::memcpy(dst, &wide, sizeof(wide));
  } else if constexpr (Dst == DType::kF32) {
    const float narrow = static_cast<float>(value);
    std::memcpy(dst, &narrow, sizeof(narrow));
  } else {
    const float narrow = static_cast<float>(value);
    const uint16_t bits = Dst == DType::kF16 ? float_to_f16(narrow) : float_to_bf16(narrow);
    std::memcpy(dst, &bits, sizeof(bits));
  }
}

template <DType Dst, DType Src>
TDDP_ALWAYS_INLINE void scale_cast_scalar(unsigned char* dst, const unsigned char* src, int64_t numel, double scale) {
  using T = Product<Dst, Src>;
  const T factor = static_cast<T>(scale);
  for (int64_t i = 0; i < numel; ++i) {
    store_as<Dst>(dst + i * float_item_size(Dst), load_as<Src, T>(src + i * float_item_size(Src)) * factor);
  }
}

}  // namespace torchddp::kernels
