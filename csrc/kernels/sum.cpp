// Checks the arguments of a reduction, then makes one indirect call.
#include "kernels/sum.h"

#include <cstring>
#include <stdexcept>

#include "kernels/kernel_table.h"
#include "kernels/pack.h"

namespace torchddp::kernels {

void SumFindings::note(const void* const* srcs, int64_t num_srcs, DType type, int64_t at, int64_t bytes) {
  sum = true;
  for (int64_t rank = 0; rank < num_srcs; ++rank) {
    counts[rank] += count_non_finite(static_cast<const unsigned char*>(srcs[rank]) + at, type, bytes / item_size(type));
  }
}

void reduce_ranks(std::span<void* const> dsts, std::span<const void* const> srcs, DType type, ReduceOp op,
                  int64_t numel) {
  if (srcs.empty()) throw std::invalid_argument("a reduction needs at least one source");
  if (numel <= 0) return;
  if (srcs.size() == 1) {
    for (void* dst : dsts) {
      if (dst != srcs[0]) std::memcpy(dst, srcs[0], static_cast<size_t>(numel * item_size(type)));
    }
    return;
  }
  active_table().reduce[static_cast<size_t>(type)][static_cast<size_t>(op)](
      dsts.data(), static_cast<int64_t>(dsts.size()), srcs.data(), nullptr, static_cast<int64_t>(srcs.size()), numel,
      nullptr);
}

bool can_scale(DType type) { return type == DType::kF64 || type == DType::kF32; }

void scaled_sum_ranks(std::span<void* const> dsts, std::span<const void* const> srcs, std::span<const double> scales,
                      DType type, int64_t numel) {
  if (srcs.empty() || scales.size() != srcs.size()) {
    throw std::invalid_argument("a scaled sum needs at least one source, and one factor for each");
  }
  if (!can_scale(type)) throw std::invalid_argument("only fp64 and fp32 are scaled while they are summed");
  if (numel <= 0) return;
  active_table().scaled_sum[static_cast<size_t>(type)](dsts.data(), static_cast<int64_t>(dsts.size()), srcs.data(),
                                                       scales.data(), static_cast<int64_t>(srcs.size()), numel,
                                                       nullptr);
}

bool checked_sum_ranks(std::span<void* const> dsts, std::span<const void* const> srcs, std::span<const double> scales,
                       DType type, int64_t numel, std::span<int64_t> counts) {
  if (srcs.empty() || counts.size() != srcs.size() || (!scales.empty() && scales.size() != srcs.size())) {
    throw std::invalid_argument("a checked sum needs at least one source, and one count and factor for each");
  }
  if (!is_float(type)) throw std::invalid_argument("only sums of floats are checked");
  if (!scales.empty() && !can_scale(type)) {
    throw std::invalid_argument("only fp64 and fp32 are scaled while they are summed");
  }
  if (numel <= 0) return false;
  if (srcs.size() == 1 && scales.empty()) {
    const int64_t count = count_non_finite(srcs[0], type, numel);
    counts[0] += count;
    reduce_ranks(dsts, srcs, type, ReduceOp::kSum, numel);
    return count > 0;
  }
  const KernelTable& table = active_table();
  const auto index = static_cast<size_t>(type);
  const ReduceFn kernel = scales.empty() ? table.checked_sum[index] : table.checked_scaled_sum[index];
  SumFindings found{counts.data()};
  kernel(dsts.data(), static_cast<int64_t>(dsts.size()), srcs.data(), scales.empty() ? nullptr : scales.data(),
         static_cast<int64_t>(srcs.size()), numel, &found);
  return found.sum;
}

}  // namespace torchddp::kernels
