// Gradients into or out of the slots of one bucket, all at once: on CUDA in one launch a dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "bucket/grad_slot.h"
#include "kernels/pack_cuda.h"

namespace torchddp::bucket {

// Works on the current stream.
class DevicePieces {
 public:
  using Direction = kernels::Direction;

  // `together`: CPU gradients wait for run() too, as a device's do.
  explicit DevicePieces(Direction direction, double scale = 1.0, bool together = true)
      : direction_(direction), scale_(scale), together_(together) {}

  // slot <- gradient * scale, or gradient <- slot: any gradient of the slot's shape. Moved by run(), which it lives to see; at once if
  // it is laid out otherwise than the slot, or need not wait.
  void add(GradSlot& slot, const at::Tensor& gradient);
  void run();

 private:
  const Direction direction_;
  const double scale_;
  const bool together_;
  std::array<std::vector<kernels::DevicePiece>, kernels::kNumDTypes> pieces_;  // by the gradients' dtype
  std::vector<at::Tensor> gradients_;
  const GradSlot* any_slot_ = nullptr;  // of the bucket
};

}  // namespace torchddp::bucket
