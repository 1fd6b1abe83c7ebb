// One table of functions per instruction set, and which of them is active. Internal to kernels/ and its tests.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/compress.h"
#include "kernels/dtype.h"
#include "kernels/sum.h"

namespace torchddp::kernels {

inline constexpr int kNumReduceOps = 3;

// What a checked sum found.
struct SumFindings {
  // The sum of these bytes is not finite; counts the non-finite values of each source.
  void note(const void* const* srcs, int64_t num_srcs, DType type, int64_t at, int64_t bytes);

  int64_t* counts;  // by source
  bool sum = false;
};

// Types, operations, formats and the instruction set are fixed.

// dst[i] = cast(src[i] * scale)
using ScaleCastFn = void (*)(void* dst, const void* src, int64_t numel, double scale);

// reduce_ranks; num_srcs > 0. `scales` is read by the scaled ones only, `found` by those that check.
using ReduceFn = void (*)(void* const* dsts, int64_t num_dsts, const void* const* srcs, const double* scales,
                          int64_t num_srcs, int64_t numel, SumFindings* found);

// Scales and codes are the two parts of the compressed bytes. kFp16 and kBf16 have no scales.
using CompressFn = void (*)(unsigned char* scales, unsigned char* codes, const float* source, float* residual,
                            int64_t numel, float scale);
using DecompressFn = void (*)(const unsigned char* scales, const unsigned char* codes, float* out, int64_t numel);

// Whole blocks into the lanes.
using HashBlocksFn = void (*)(uint64_t* lanes, const unsigned char* data, int64_t blocks);

// Whether any element is an infinity or a NaN.
using AnyNonFiniteFn = bool (*)(const unsigned char* data, int64_t numel);

struct KernelTable {
  const char* capability;
  std::array<std::array<ScaleCastFn, kNumFloatTypes>, kNumFloatTypes> scale_cast;  // [destination][source]
  std::array<std::array<ReduceFn, kNumReduceOps>, kNumDTypes> reduce;              // [type][operation]
  std::array<ReduceFn, 2> scaled_sum;                                              // [kF64, kF32]
  std::array<ReduceFn, kNumFloatTypes> checked_sum;                                // [type]
  std::array<ReduceFn, 2> checked_scaled_sum;                                      // [kF64, kF32]
  std::array<std::array<CompressFn, 2>, kFormatNames.size()> compress;             // [format][has residual]
  std::array<std::array<DecompressFn, 2>, kFormatNames.size()> decompress;         // [format][accumulates]
  HashBlocksFn hash_blocks;
  std::array<AnyNonFiniteFn, kNumFloatTypes> any_non_finite;  // [type]
};

extern const KernelTable generic_kernels;
// On x86-64 only.
extern const KernelTable avx2_kernels;
extern const KernelTable avx512_kernels;

// The active table.
const KernelTable& active_table();

// What this processor can run, best first; the last is always "generic".
std::vector<const KernelTable*> supported_tables();

// What TORCHDDP_CPU_CAPABILITY=`wanted` chooses on this processor; null and "" set no limit.
const KernelTable* table_for(const char* wanted);

// Switches the kernels of the whole process, so that one test run covers every instruction set. Must not run at the same time as
// a kernel whose result matters.
void set_active_table(const KernelTable* table);

}  // namespace torchddp::kernels
