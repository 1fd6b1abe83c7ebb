// Inside of the statistics kernels: one table per instruction set, reached through its KernelTable. Not for use outside
// kernels/ and its tests.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/stats.h"

namespace torchddp::kernels {

// Sums that are carried side by side: enough for the widest vectors, twice.
inline constexpr int64_t kStatsLanes = 16;

// Elements of one call of a kernel. Small enough that what was just written is still in the first-level cache.
inline constexpr int64_t kStatsChunk = 1024;

// The statistics of a chunk, type and instruction set fixed.
using StatsFn = GradStats (*)(const void* data, int64_t numel);
using StatsTable = std::array<StatsFn, kNumFloatTypes>;

extern const StatsTable generic_stats;
// On x86-64 only.
extern const StatsTable avx2_stats;
extern const StatsTable avx512_stats;

}  // namespace torchddp::kernels
