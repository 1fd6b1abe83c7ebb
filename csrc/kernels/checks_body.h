// The loops of the kernels that check memory, written once with the compiler's vector types and compiled for each instruction set.
//
// Included by one file per instruction set, which defines TDDP_CHECKS_TARGET (the target attribute, or nothing) beforehand:
// every function must carry it. The definitions therefore differ from file to file, hence the unnamed namespace in a header.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/check_table.h"
#include "kernels/float_bits.h"

#ifndef TDDP_CHECKS_TARGET
#error "define TDDP_CHECKS_TARGET before including this file"
#endif
#define TDDP_CHECKS_INLINE TDDP_CHECKS_TARGET __attribute__((always_inline)) inline

namespace torchddp::kernels {
namespace {

// `Isa` names the instruction set: kBytes of a vector; for 64-bit words, multiply_halves (of each word: the lower half times the upper)
// and swap_neighbours.
template <class Isa>
struct HashKernel {
  typedef uint64_t Vector __attribute__((vector_size(Isa::kBytes)));
  static constexpr int kWidth = Isa::kBytes / 8;
  static constexpr int kVectors = kHashLanes / kWidth;

  static TDDP_CHECKS_INLINE Vector load(const void* from) {
    Vector value;
    __builtin_memcpy(&value, from, sizeof(value));
    return value;
  }

  TDDP_CHECKS_TARGET static void run(uint64_t* lanes, const unsigned char* data, int64_t blocks) {
    Vector sums[kVectors];
    __builtin_memcpy(sums, lanes, sizeof(sums));
    for (int64_t block = 0; block < blocks; ++block) {
#pragma GCC unroll 4
      for (int stripe = 0; stripe < kHashStripes; ++stripe) {
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
          const Vector words = load(data + i * Isa::kBytes);
          const Vector keyed = words ^ load(&kHashKeys[static_cast<size_t>(stripe + i * kWidth)]);
          sums[i] += Isa::multiply_halves(keyed) + Isa::swap_neighbours(words);
        }
        data += kHashStripeBytes;
      }
      for (int i = 0; i < kVectors; ++i) {
        const Vector keys = load(&kHashKeys[static_cast<size_t>(kHashStripes + i * kWidth)]);
        sums[i] = (sums[i] ^ (sums[i] >> 47) ^ keys) * kHashPrime;
      }
    }
    __builtin_memcpy(lanes, sums, sizeof(sums));
  }
};

template <class Isa, DType Src>
struct FiniteKernel {
  using Word = Bits<item_size(Src)>;
  typedef Word Vector __attribute__((vector_size(Isa::kBytes)));
  static constexpr int64_t kWidth = Isa::kBytes / static_cast<int64_t>(sizeof(Word));
  static constexpr int kVectors = 4;  // side by side

  TDDP_CHECKS_TARGET static bool run(const unsigned char* data, int64_t numel) {
    constexpr Word kExponent = exponent_bits<Src>();
    Vector found[kVectors] = {};
    int64_t i = 0;
    for (; i + kVectors * kWidth <= numel; i += kVectors * kWidth) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        Vector words;
        __builtin_memcpy(&words, data + (i + j * kWidth) * static_cast<int64_t>(sizeof(Word)), sizeof(words));
        found[j] |= (Vector)((words & kExponent) == kExponent);
      }
    }
    const Vector all = found[0] | found[1] | found[2] | found[3];
    uint64_t parts[Isa::kBytes / 8];
    __builtin_memcpy(parts, &all, sizeof(parts));
    uint64_t any = 0;
    for (const uint64_t part : parts) any |= part;
    for (; i < numel; ++i) {
      Word word;
      __builtin_memcpy(&word, data + i * static_cast<int64_t>(sizeof(Word)), sizeof(word));
      any |= (word & kExponent) == kExponent ? 1u : 0u;
    }
    return any != 0;
  }
};

template <class Isa>
constexpr CheckTable make_check_table() {
  return {&HashKernel<Isa>::run,
          {&FiniteKernel<Isa, DType::kF64>::run, &FiniteKernel<Isa, DType::kF32>::run,
           &FiniteKernel<Isa, DType::kF16>::run, &FiniteKernel<Isa, DType::kBF16>::run}};
}

}  // namespace
}  // namespace torchddp::kernels
