// The loops of the compression kernels, compiled for each instruction set: see isa.h. The formats: Note [Compressed formats] in
// compress.h.
//
// A block is worked on in two rounds, the second of which finds its numbers in the first-level cache: the first round leaves v
// in the residual. A short last block is a whole one with zeros behind it.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/compress.h"
#include "kernels/isa.h"

namespace torchddp::kernels {
namespace {

// One number at any alignment.
TDDP_INLINE float load_float(const float* src) {
  return load_as<DType::kF32, float>(reinterpret_cast<const unsigned char*>(src));
}

TDDP_INLINE void store_float(float* dst, float value) { std::memcpy(dst, &value, sizeof(value)); }

// Vectors of memory at any alignment.
template <class Isa>
struct VectorAccess {
  using Floats = typename Isa::Floats;
  using Ints = typename Isa::Ints;
  static constexpr int64_t kAhead = 256;
  typedef float Unaligned __attribute__((vector_size(sizeof(Floats)), aligned(1), may_alias));

  static TDDP_INLINE Floats load(const float* src) { return *reinterpret_cast<const Unaligned*>(src); }
  static TDDP_INLINE void store(float* dst, Floats value) { *reinterpret_cast<Unaligned*>(dst) = value; }
  static TDDP_INLINE Ints magnitude(Floats value) {
    return reinterpret_cast<Ints>(value) & static_cast<int32_t>(0x7FFFFFFF);
  }

  // v, and into the residual with it.
  template <bool kResidual>
  static TDDP_INLINE Floats first_round(const float* source, float* residual, float scale) {
    Floats value = load(source) * scale;
    if constexpr (kResidual) {
      value += load(residual);
      store(residual, value);
    }
    return value;
  }

  // v once more; and meanwhile what a first round will soon want is fetched, or memory would rest in every second round.
  template <bool kResidual>
  static TDDP_INLINE Floats second_round(const float* source, const float* residual, float scale) {
    __builtin_prefetch(source + kAhead);
    if constexpr (kResidual) __builtin_prefetch(residual + kAhead, 1);
    return kResidual ? load(residual) : load(source) * scale;
  }
};

// kInt8 and kInt4.
template <class Isa, Format kFormat>
struct Quantized : VectorAccess<Isa> {
  using Access = VectorAccess<Isa>;
  using Floats = typename Isa::Floats;
  using Ints = typename Isa::Ints;
  static constexpr int64_t kBlock = block_numel(kFormat);
  static constexpr int64_t kCodeBytes = kBlock * code_bits(kFormat) / 8;
  static constexpr bool kNibbles = kFormat == Format::kInt4;
  static constexpr float kLargest = kNibbles ? 7 : 127;
  static constexpr unsigned char kZeroCodes = kNibbles ? 0x88 : 0x00;
  // Added to a small number, it rounds it to an integer, to nearest even, and leaves that in the lowest bits (a nibble plus 8).
  static constexpr float kRounder = 0x1.8p23f + (kNibbles ? 8 : 0);

  template <bool kResidual>
  static TDDP_INLINE uint32_t largest_magnitude(const float* source, float* residual, float scale) {
    constexpr int kChains = 4;
    Ints largest[kChains] = {};
    for (int64_t i = 0; i < kBlock; i += kChains * Isa::kWidth) {
#pragma GCC unroll 4
      for (int j = 0; j < kChains; ++j) {
        const int64_t at = i + j * Isa::kWidth;
        const Floats value = Access::template first_round<kResidual>(source + at, residual + at, scale);
        largest[j] = Isa::larger(largest[j], Access::magnitude(value));
      }
    }
    return Isa::largest(Isa::larger(Isa::larger(largest[0], largest[1]), Isa::larger(largest[2], largest[3])));
  }

  template <bool kResidual>
  static TDDP_INLINE void encode(unsigned char* codes, const float* source, float* residual, float scale, float inverse,
                                 float block_scale) {
    constexpr int64_t kUnitNumel = Isa::kUnit * Isa::kWidth;
    for (int64_t i = 0; i < kBlock; i += kUnitNumel) {
      Ints unit[Isa::kUnit];
#pragma GCC unroll 4
      for (int j = 0; j < Isa::kUnit; ++j) {
        const int64_t at = i + j * Isa::kWidth;
        const Floats value = Access::template second_round<kResidual>(source + at, residual + at, scale);
        const Floats rounded = value * inverse + kRounder;
        unit[j] = reinterpret_cast<Ints>(rounded);
        if constexpr (kResidual) Access::store(residual + at, value - (rounded - kRounder) * block_scale);
      }
      if constexpr (kNibbles) {
        Isa::store_nibbles(codes + i / 2, unit);
      } else {
        Isa::store_bytes(codes + i, unit);
      }
    }
  }

  template <bool kResidual>
  static TDDP_INLINE float block(unsigned char* codes, const float* source, float* residual, float scale) {
    const uint32_t bits = largest_magnitude<kResidual>(source, residual, scale);
    if (bits >= exponent_bits<DType::kF32>()) [[unlikely]] {
      std::memset(codes, kZeroCodes, kCodeBytes);
      if constexpr (kResidual) std::memset(residual, 0, kBlock * sizeof(float));
      return std::numeric_limits<float>::quiet_NaN();
    }
    const float largest = bits_as<float>(bits);
    float inverse = kLargest / largest;
    float block_scale = largest / kLargest;
    if (inverse > std::numeric_limits<float>::max()) [[unlikely]] {
      inverse = 0;
      block_scale = 0;
    } else if (block_scale * kLargest > std::numeric_limits<float>::max()) [[unlikely]] {
      block_scale = bits_as<float>(bits_as<uint32_t>(block_scale) - 1);
    }
    encode<kResidual>(codes, source, residual, scale, inverse, block_scale);
    return block_scale;
  }

  template <bool kAccumulate>
  static TDDP_INLINE void decode(const unsigned char* codes, float* out, float block_scale) {
    for (int64_t i = 0; i < kBlock; i += Isa::kUnit * Isa::kWidth) {
      Ints unit[Isa::kUnit];
      if constexpr (kNibbles) {
        Isa::load_nibbles(codes + i / 2, unit);
      } else {
        Isa::load_bytes(codes + i, unit);
      }
#pragma GCC unroll 4
      for (int j = 0; j < Isa::kUnit; ++j) {
        float* to = out + i + j * Isa::kWidth;
        const Ints code = kNibbles ? unit[j] - 8 : unit[j];
        const Floats value = __builtin_convertvector(code, Floats) * block_scale;
        Access::store(to, kAccumulate ? Access::load(to) + value : value);
      }
    }
  }

  // All blocks.
  template <bool kResidual>
  TDDP_TARGET static void compress(unsigned char* scales, unsigned char* codes, const float* source, float* residual,
                                   int64_t numel, float scale) {
    for (; numel >= kBlock; numel -= kBlock) {
      const float block_scale = block<kResidual>(codes, source, residual, scale);
      std::memcpy(scales, &block_scale, sizeof(float));
      scales += sizeof(float);
      codes += kCodeBytes;
      source += kBlock;
      if constexpr (kResidual) residual += kBlock;
    }
    if (numel == 0) return;
    const size_t bytes = static_cast<size_t>(numel) * sizeof(float);
    float whole_source[kBlock] = {}, whole_residual[kResidual ? kBlock : 1] = {};
    unsigned char whole_codes[kCodeBytes];
    std::memcpy(whole_source, source, bytes);
    if constexpr (kResidual) std::memcpy(whole_residual, residual, bytes);
    const float block_scale = block<kResidual>(whole_codes, whole_source, whole_residual, scale);
    std::memcpy(scales, &block_scale, sizeof(float));
    std::memcpy(codes, whole_codes, static_cast<size_t>((numel * kCodeBytes + kBlock - 1) / kBlock));
    if constexpr (kResidual) std::memcpy(residual, whole_residual, bytes);
  }

  template <bool kAccumulate>
  TDDP_TARGET static void decompress(const unsigned char* scales, const unsigned char* codes, float* out,
                                     int64_t numel) {
    float block_scale;
    for (; numel >= kBlock; numel -= kBlock) {
      std::memcpy(&block_scale, scales, sizeof(float));
      decode<kAccumulate>(codes, out, block_scale);
      scales += sizeof(float);
      codes += kCodeBytes;
      out += kBlock;
    }
    if (numel == 0) return;
    const size_t bytes = static_cast<size_t>(numel) * sizeof(float);
    float whole_out[kBlock] = {};
    unsigned char whole_codes[kCodeBytes] = {};
    std::memcpy(&block_scale, scales, sizeof(float));
    std::memcpy(whole_codes, codes, static_cast<size_t>((numel * kCodeBytes + kBlock - 1) / kBlock));
    if constexpr (kAccumulate) std::memcpy(whole_out, out, bytes);
    decode<kAccumulate>(whole_codes, whole_out, block_scale);
    std::memcpy(out, whole_out, bytes);
  }
};

// kFp16 and kBf16.
template <class Isa, DType kHalf>
struct Halves : VectorAccess<Isa> {
  using Access = VectorAccess<Isa>;
  using Floats = typename Isa::Floats;
  using Ints = typename Isa::Ints;

  // What the 16 bits could not hold; zero where that is not finite.
  template <class Values>
  static TDDP_INLINE Values kept(Values value, Values decoded) {
    const Values error = value - decoded;
    return error - error == error - error ? error : Values{};
  }

  template <bool kResidual>
  TDDP_TARGET static void compress(unsigned char* /*scales*/, unsigned char* codes, const float* source,
                                   float* residual, int64_t numel, float scale) {
    int64_t i = 0;
    for (; i + Isa::kWidth <= numel; i += Isa::kWidth) {
      const Floats value = Access::template first_round<kResidual>(source + i, residual + i, scale);
      Isa::template store<kHalf>(codes + 2 * i, value);
      if constexpr (kResidual) {
        Access::store(residual + i, kept<Floats>(value, Isa::template load<kHalf>(codes + 2 * i)));
      }
    }
    for (; i < numel; ++i) {
      float value = load_float(source + i) * scale;
      if constexpr (kResidual) value += load_float(residual + i);
      store_as<kHalf>(codes + 2 * i, value);
      if constexpr (kResidual) store_float(residual + i, kept<float>(value, load_as<kHalf, float>(codes + 2 * i)));
    }
  }

  template <bool kAccumulate>
  TDDP_TARGET static void decompress(const unsigned char* /*scales*/, const unsigned char* codes, float* out,
                                     int64_t numel) {
    int64_t i = 0;
    for (; i + Isa::kWidth <= numel; i += Isa::kWidth) {
      const Floats value = Isa::template load<kHalf>(codes + 2 * i);
      Access::store(out + i, kAccumulate ? Access::load(out + i) + value : value);
    }
    for (; i < numel; ++i) {
      const float value = load_as<kHalf, float>(codes + 2 * i);
      store_float(out + i, kAccumulate ? load_float(out + i) + value : value);
    }
  }
};

}  // namespace
}  // namespace torchddp::kernels
