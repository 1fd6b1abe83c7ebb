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

bool can_scale(DType type) { return type == DType::kF64 || type == DType::kF32; }

bool reduce_ranks(std::span<void* const> dsts, std::span<const void* const> srcs, DType type, ReduceOp op,
                  int64_t numel, std::span<const double> scales, std::span<int64_t> counts) {
  const bool scaled = !scales.empty();
  const bool checked = !counts.empty();
  if (srcs.empty()) throw std::invalid_argument("a reduction needs at least one source");
  if ((scaled && scales.size() != srcs.size()) || (checked && counts.size() != srcs.size())) {
    throw std::invalid_argument("a reduction needs one factor and one count for each source, or none");
  }
  if (scaled && (op != ReduceOp::kSum || !can_scale(type))) {
    throw std::invalid_argument("only fp64 and fp32 are scaled while they are summed");
  }
  if (checked && (op != ReduceOp::kSum || !is_float(type))) {
    throw std::invalid_argument("only sums of floats are checked");
  }
  if (numel <= 0) return false;
  if (srcs.size() == 1 && !scaled) {
    const int64_t count = checked ? count_non_finite(srcs[0], type, numel) : 0;
    if (checked) counts[0] += count;
    for (void* dst : dsts) {
      if (dst != srcs[0]) std::memcpy(dst, srcs[0], static_cast<size_t>(numel * item_size(type)));
    }
    return count > 0;
  }
  const KernelTable& table = active_table();
  const auto index = static_cast<size_t>(type);
  const ReduceFn kernel = !scaled && !checked ? table.reduce[index][static_cast<size_t>(op)]
                          : !scaled           ? table.checked_sum[index]
                          : !checked          ? table.scaled_sum[index]
                                              : table.checked_scaled_sum[index];
  SumFindings found{counts.data()};
  kernel(dsts.data(), static_cast<int64_t>(dsts.size()), srcs.data(), scales.data(), static_cast<int64_t>(srcs.size()),
         numel, &found);
  return found.sum;
}

}  // namespace torchddp::kernels
