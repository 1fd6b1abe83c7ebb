// Inside of the sum kernels: one table per instruction set, reached through its KernelTable. Not for use outside
// kernels/.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/sum.h"

namespace torchddp::kernels {

inline constexpr int kNumSumTypes = 9;
inline constexpr int kNumReduceOps = 4;

// reduce_ranks with type, operation and instruction set fixed; num_srcs > 0. `scales` is read by the scaled ones only.
using ReduceFn = void (*)(void* const* dsts, int64_t num_dsts, const void* const* srcs, const double* scales,
                          int64_t num_srcs, int64_t numel);

struct SumTable {
  std::array<std::array<ReduceFn, kNumReduceOps>, kNumSumTypes> reduce;  // [type][operation]
  std::array<ReduceFn, 2> scaled_sum;                                    // kF64, kF32
};

extern const SumTable generic_sums;
// On x86-64 only.
extern const SumTable avx2_sums;
extern const SumTable avx512_sums;

}  // namespace torchddp::kernels
