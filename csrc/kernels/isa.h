// What the bodies of the kernels have in common. They are written once, over `Isa` and with the compiler's vector types, and
// compiled for each instruction set.
//
// Included by isa_*.cpp, one file per instruction set, by way of isa_table.h. The file defines TDDP_TARGET (the target
// attribute, or nothing) beforehand, and every function must carry it, as TDDP_TARGET or in TDDP_INLINE: the compiler lowers
// vector arithmetic before it inlines, and what has no such attribute is baseline code. The definitions therefore differ from
// file to file, hence the unnamed namespaces in headers.
//
// `Isa` names the instruction set: Vectors<kBytes>, and
//   load<DType>, store<DType>       a vector of floats from and to 16-bit floats, at any alignment
//   kHasVectorHalves                whether these are more than loops over the elements
//   scale_cast<Dst, Src>            the kernel: how it handles the last elements depends on the instructions
//   any_top_bit                     whether the highest bit of any word of 32 or 64 bits is set
//   multiply_halves                 of each 64-bit word: the lower half times the upper
//   swap_neighbors                 of 64-bit words
//   larger, largest                 of integers: in each place, in a vector
// and for units of kUnit vectors of integers
//   store_bytes, store_nibbles      the lowest bits of each
//   load_bytes, load_nibbles        signed bytes, unsigned nibbles
#pragma once

#include <cstdint>

#include "kernels/float_bits.h"

#ifndef TDDP_TARGET
#error "define TDDP_TARGET before including this file"
#endif
#define TDDP_INLINE TDDP_TARGET __attribute__((always_inline)) inline

namespace torchddp::kernels {
namespace {

template <int kSize>
struct Vectors {
  static constexpr int64_t kBytes = kSize;
  static constexpr int64_t kWidth = kSize / 4;  // floats in a vector
  typedef float Floats __attribute__((vector_size(kSize)));
  typedef int32_t Ints __attribute__((vector_size(kSize)));
  typedef uint32_t Words32 __attribute__((vector_size(kSize)));
  typedef uint64_t Words64 __attribute__((vector_size(kSize)));
};

// One element at a time: what every instruction set must agree with, bit for bit.
template <DType Dst, DType Src>
TDDP_INLINE void scale_cast_each(unsigned char* dst, const unsigned char* src, int64_t numel, double scale) {
  using T = Product<Dst, Src>;
  const T factor = static_cast<T>(scale);
  for (int64_t i = 0; i < numel; ++i) {
    store_as<Dst>(dst + i * item_size(Dst), load_as<Src, T>(src + i * item_size(Src)) * factor);
  }
}

}  // namespace
}  // namespace torchddp::kernels
