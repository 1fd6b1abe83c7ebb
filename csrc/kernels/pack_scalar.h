// One element at a time, on the CPU: what every instruction set must agree with, bit for bit. Always inlined, for the reason
// given in float_bits.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/float_bits.h"

namespace torchddp::kernels {

// Loads and stores go through memcpy: views of mixed types may leave elements unaligned.
template <DType Src, class T>
TDDP_ALWAYS_INLINE T load_as(const unsigned char* src) {
  Bits<item_size(Src)> bits;
  std::memcpy(&bits, src, sizeof(bits));
  return from_bits<Src, T>(bits);
}

template <DType Dst, class T>
TDDP_ALWAYS_INLINE void store_as(unsigned char* dst, T value) {
  const auto bits = to_bits<Dst, T>(value);
  std::memcpy(dst, &bits, sizeof(bits));
}

template <DType Dst, DType Src>
TDDP_ALWAYS_INLINE void scale_cast_scalar(unsigned char* dst, const unsigned char* src, int64_t numel, double scale) {
  using T = Product<Dst, Src>;
  const T factor = static_cast<T>(scale);
  for (int64_t i = 0; i < numel; ++i) {
    store_as<Dst>(dst + i * item_size(Dst), load_as<Src, T>(src + i * item_size(Src)) * factor);
  }
}

}  // namespace torchddp::kernels
