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
      dsts.data(), static_cast<int64_t>(dsts.size()), srcs.data(), static_cast<int64_t>(srcs.size()), numel);
}

}  // namespace torchddp::kernels
