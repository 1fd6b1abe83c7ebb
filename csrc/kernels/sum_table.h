// Inside of the sum kernels: one table per instruction set, reached through its KernelTable. Not for use outside
// kernels/.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/sum.h"

namespace torchddp::kernels {

inline constexpr int kNumReduceOps = 4;

// reduce_ranks with type, operation and instruction set fixed; num_srcs > 0. `scales` is read by the scaled ones only.
using ReduceFn = void (*)(void* const* dsts, int64_t num_dsts, const void* const* srcs, const double* scales,
                          int64_t num_srcs, int64_t numel);

// Bits of the smallest number that is infinite when it is stored as `type`: of a double for kF64, of a float for the others, of which
// the 16-bit ones are rounded to nearest.
constexpr uint64_t least_not_finite(DType type) {
  if (type == DType::kF64) return 0x7FF0000000000000u;
  return type == DType::kF16 ? 0x477FF000u : type == DType::kBF16 ? 0x7F7F8000u : 0x7F800000u;
}

// What a checked sum found.
struct SumFindings {
  // A sum in these bytes is not finite. Counts what of the sources is not.
  void note(const void* const* srcs, int64_t num_srcs, DType type, int64_t at, int64_t bytes);

  int64_t* counts;  // by source
  bool sum = false;
};

using CheckedSumFn = void (*)(void* const* dsts, int64_t num_dsts, const void* const* srcs, const double* scales,
                              int64_t num_srcs, int64_t numel, SumFindings* found);

struct SumTable {
  std::array<std::array<ReduceFn, kNumReduceOps>, kNumDTypes> reduce;  // [type][operation]
  std::array<ReduceFn, 2> scaled_sum;                                  // kF64, kF32
  std::array<CheckedSumFn, 4> checked_sum;                             // kF64, kF32, kF16, kBF16
  std::array<CheckedSumFn, 2> checked_scaled_sum;                      // kF64, kF32
};

extern const SumTable generic_sums;
// On x86-64 only.
extern const SumTable avx2_sums;
extern const SumTable avx512_sums;

}  // namespace torchddp::kernels
