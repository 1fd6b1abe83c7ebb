// The checks of a reduction, then one indirect call.
#include "kernels/sum.h"

#include <cstring>
#include <stdexcept>

#include "kernels/pack_table.h"
#include "kernels/sum_table.h"

namespace torchddp::kernels {

int64_t item_size(SumType type) {
  constexpr int64_t kBytes[] = {8, 4, 2, 2, 1, 1, 2, 4, 8};
  return kBytes[static_cast<int>(type)];
}

void reduce_ranks(std::span<void* const> dsts, std::span<const void* const> srcs, SumType type, ReduceOp op,
                  int64_t numel) {
  if (srcs.empty()) throw std::invalid_argument("a reduction needs at least one source");
  if (numel <= 0) return;
  if (srcs.size() == 1) {
    for (void* dst : dsts) {
      if (dst != srcs[0]) std::memcpy(dst, srcs[0], static_cast<size_t>(numel * item_size(type)));
    }
    return;
  }
  active_table().sums->reduce[static_cast<size_t>(type)][static_cast<size_t>(op)](
      dsts.data(), static_cast<int64_t>(dsts.size()), srcs.data(), nullptr, static_cast<int64_t>(srcs.size()), numel);
}

bool can_scale(SumType type) { return type == SumType::kF64 || type == SumType::kF32; }

void scaled_sum_ranks(std::span<void* const> dsts, std::span<const void* const> srcs, std::span<const double> scales,
                      SumType type, int64_t numel) {
  if (srcs.empty() || scales.size() != srcs.size()) {
    throw std::invalid_argument("a scaled sum needs at least one source, and one factor for each");
  }
  if (!can_scale(type)) throw std::invalid_argument("only fp64 and fp32 are scaled while they are summed");
  if (numel <= 0) return;
  active_table().sums->scaled_sum[static_cast<size_t>(type)](dsts.data(), static_cast<int64_t>(dsts.size()),
                                                             srcs.data(), scales.data(),
                                                             static_cast<int64_t>(srcs.size()), numel);
}

}  // namespace torchddp::kernels
