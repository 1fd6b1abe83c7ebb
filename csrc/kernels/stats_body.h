// The loop of the statistics kernels, written once with the compiler's vector types and compiled for each instruction set.
//
// Included by one file per instruction set, which defines TDDP_STATS_TARGET (the target attribute, or nothing) beforehand:
// every function must carry it. The definitions therefore differ from file to file, hence the unnamed namespace in a header.
#pragma once

#include <cstdint>

#include "kernels/pack_scalar.h"
#include "kernels/stats_table.h"

#ifndef TDDP_STATS_TARGET
#error "define TDDP_STATS_TARGET before including this file"
#endif
#define TDDP_STATS_INLINE TDDP_STATS_TARGET __attribute__((always_inline)) inline

namespace torchddp::kernels {
namespace {

// `Isa` names the instruction set: kWidth, the doubles in a vector, and load<DType>, which widens that many elements.
//
// Element i is added to lane i % kStatsLanes, whatever the width of a vector, and the lanes are added pairwise at the end.
template <class Isa, DType Src>
struct StatsKernel {
  typedef double Vector __attribute__((vector_size(Isa::kWidth * sizeof(double))));
  typedef int64_t Counts __attribute__((vector_size(Isa::kWidth * sizeof(double))));
  static constexpr int64_t kBytes = item_size(Src);
  static constexpr int kVectors = static_cast<int>(kStatsLanes / Isa::kWidth);

  TDDP_STATS_TARGET static GradStats run(const void* data, int64_t numel) {
    const auto* src = static_cast<const unsigned char*>(data);
    Vector sums[kVectors] = {};
    Counts counts[kVectors] = {};
    int64_t i = 0;
    for (; i + kStatsLanes <= numel; i += kStatsLanes) {
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        const Vector value = Isa::template load<Src>(src + (i + j * Isa::kWidth) * kBytes);
        sums[j] += value * value;
        const Vector zero = value - value;  // NaN for an infinity and for a NaN
        counts[j] -= zero != zero;          // true is -1
      }
    }
    GradStats lanes[kStatsLanes];
    for (int64_t lane = 0; lane < kStatsLanes; ++lane) {
      lanes[lane] = {sums[lane / Isa::kWidth][lane % Isa::kWidth], counts[lane / Isa::kWidth][lane % Isa::kWidth]};
    }
    for (int64_t lane = 0; i < numel; ++i, ++lane) {
      const double value = load_as<Src, double>(src + i * kBytes);
      const double zero = value - value;
      lanes[lane].sum_squares += value * value;
      lanes[lane].non_finite += zero != zero ? 1 : 0;
    }
    for (int64_t stride = kStatsLanes / 2; stride > 0; stride /= 2) {
      for (int64_t lane = 0; lane < stride; ++lane) {
        lanes[lane].sum_squares += lanes[lane + stride].sum_squares;
        lanes[lane].non_finite += lanes[lane + stride].non_finite;
      }
    }
    return lanes[0];
  }
};

template <class Isa>
constexpr StatsTable make_stats_table() {
  return {{&StatsKernel<Isa, DType::kF64>::run, &StatsKernel<Isa, DType::kF32>::run,
           &StatsKernel<Isa, DType::kF16>::run, &StatsKernel<Isa, DType::kBF16>::run}};
}

}  // namespace
}  // namespace torchddp::kernels
