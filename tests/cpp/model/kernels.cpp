// In place of csrc/kernels: sums of a few floats, with their accesses to memory.
#include "kernels/sum.h"

#include <cmath>
#include <stdexcept>
#include <vector>

#include "model/memory.h"

namespace torchddp::kernels {

bool can_scale(DType type) { return type == DType::kF64 || type == DType::kF32; }

bool reduce_ranks(std::span<void* const> dsts, std::span<const void* const> srcs, DType type, ReduceOp op,
                  int64_t numel, std::span<const double> scales, std::span<int64_t> counts) {
  if (type != DType::kF32 || op != ReduceOp::kSum) throw std::invalid_argument("the model sums floats");
  if (!scales.empty() && counts.empty()) throw std::invalid_argument("the model does not scale");
  bool found = false;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    for (int64_t i = 0; i < numel; ++i) {
      const bool is_finite = std::isfinite(static_cast<const float*>(srcs[rank])[i]);
      counts[rank] += is_finite ? 0 : 1;
      found |= !is_finite;
    }
  }
  const auto bytes = numel * sizeof(float);
  for (const auto* source : srcs) model::read(source, bytes);
  for (auto* target : dsts) model::write(target, bytes);
  for (int64_t i = 0; i < numel; ++i) {
    float sum = 0;
    for (const auto* source : srcs) sum += static_cast<const float*>(source)[i];
    for (auto* target : dsts) static_cast<float*>(target)[i] = sum;
  }
  return found;
}

}  // namespace torchddp::kernels
