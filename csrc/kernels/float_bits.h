// The conversions between floating point types that every instruction set, and the device, must agree with.
//
// On a device the conversions to and from 16 bits are the hardware's: the same rounding (to nearest even, denormals kept),
// but a NaN comes out as the canonical one, without the payload that the CPU keeps. (By bit arithmetic, as on the CPU,
// 16-bit packing would be bound by arithmetic, not by memory.)
//
// Everything here is always inlined. The kernels that include this are compiled for different instruction sets, and an
// out-of-line copy shared by the linker could hold instructions that the processor lacks.
#pragma once

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/dtype.h"

namespace torchddp::kernels {

// The type in which the product is formed.
template <DType Dst, DType Src>
using Product = std::conditional_t<Dst == DType::kF64 || Src == DType::kF64, double, float>;

// std::bit_cast, which C++17 lacks.
template <class To, class From>
TDDP_ALWAYS_INLINE constexpr To bits_as(From value) {
  return __builtin_bit_cast(To, value);
}

TDDP_ALWAYS_INLINE float bf16_to_float(uint16_t bits) { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even; a NaN becomes quiet and keeps its sign and upper payload. On the CPU not the processor's own
// instruction (vcvtneps2bf16), which flushes denormals to zero.
TDDP_ALWAYS_INLINE uint16_t float_to_bf16(float value) {
#if defined(__CUDA_ARCH__)
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
#endif
}

TDDP_ALWAYS_INLINE float f16_to_float(uint16_t half) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(half));
#else
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00u) {  // infinity, or NaN made quiet
    const uint32_t quiet = magnitude > 0x7C00u ? 0x400000u : 0u;
    return bits_as<float>(sign | 0x7F800000u | (magnitude << 13) | quiet);
  }
  if (magnitude < 0x400u) {  // zero and denormals: a small integer times 2^-24, exact
    const float value = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    return bits_as<float>(sign | bits_as<uint32_t>(value));
  }
  return bits_as<float>(sign | ((magnitude << 13) + (112u << 23)));  // exponent bias 15 -> 127
#endif
}

// Round to nearest even; a NaN becomes quiet and keeps its sign and upper payload, as vcvtps2ph does.
TDDP_ALWAYS_INLINE uint16_t float_to_f16(float value) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half_rn(value));
#else
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
  } else if (magnitude >= 0x47800000u) {  // 65536 and above: infinity
    half = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves multiples of 2^-24, rounded by the adder
    half = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {  // exponent bias 127 -> 15; a carry out of the mantissa steps the exponent, up to infinity, as it should
    half = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
#endif
}

// An element in a register: an unsigned integer of its size.
template <int64_t kBytes>
using Bits =
    std::conditional_t<kBytes == 8, uint64_t,
                       std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>;

template <DType Src, class T>
TDDP_ALWAYS_INLINE T from_bits(Bits<item_size(Src)> bits) {
  static_assert(is_float(Src), "opaque words have no value");
  if constexpr (Src == DType::kF64) return static_cast<T>(bits_as<double>(bits));
  if constexpr (Src == DType::kF32) return static_cast<T>(bits_as<float>(bits));
  if constexpr (Src == DType::kF16) return static_cast<T>(f16_to_float(bits));
  if constexpr (Src == DType::kBF16) return static_cast<T>(bf16_to_float(bits));
}

// A double goes to a 16-bit type by way of float, as in torch.
template <DType Dst, class T>
TDDP_ALWAYS_INLINE Bits<item_size(Dst)> to_bits(T value) {
  static_assert(is_float(Dst), "opaque words have no value");
  if constexpr (Dst == DType::kF64) return bits_as<uint64_t>(static_cast<double>(value));
  if constexpr (Dst == DType::kF32) return bits_as<uint32_t>(static_cast<float>(value));
  if constexpr (Dst == DType::kF16) return float_to_f16(static_cast<float>(value));
  if constexpr (Dst == DType::kBF16) return float_to_bf16(static_cast<float>(value));
}

// Elements in the CPU's memory. By way of memcpy: views of mixed types may leave them unaligned.
template <DType Src>
TDDP_ALWAYS_INLINE Bits<item_size(Src)> load_bits(const unsigned char* src) {
  Bits<item_size(Src)> bits;
  std::memcpy(&bits, src, sizeof(bits));
  return bits;
}

template <DType Src, class T>
TDDP_ALWAYS_INLINE T load_as(const unsigned char* src) {
  return from_bits<Src, T>(load_bits<Src>(src));
}

template <DType Dst, class T>
TDDP_ALWAYS_INLINE void store_as(unsigned char* dst, T value) {
  const auto bits = to_bits<Dst, T>(value);
  std::memcpy(dst, &bits, sizeof(bits));
}

// All bits of the exponent: of an infinity and a NaN, and of nothing else.
template <DType Src>
constexpr auto exponent_bits() {
  static_assert(is_float(Src), "opaque words have no exponent");
  if constexpr (Src == DType::kF64) return uint64_t{0x7FF0000000000000u};
  if constexpr (Src == DType::kF32) return uint32_t{0x7F800000u};
  if constexpr (Src == DType::kF16) return uint16_t{0x7C00u};
  if constexpr (Src == DType::kBF16) return uint16_t{0x7F80u};
}

}  // namespace torchddp::kernels
