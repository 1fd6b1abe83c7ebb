// Moves gradients into or out of the slots of a bucket, all at once: on CUDA, one launch per dtype.
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

  // `together`: CPU gradients also wait for run(), as a device's do.
  explicit DevicePieces(Direction direction, double scale = 1.0, bool together = true)
      : direction_(direction), scale_(scale), together_(together) {}

  // slot <- gradient * scale, or gradient <- slot, for any gradient of the slot's shape. run() moves it, so it must live until
  // then. It is moved at once if its layout differs from the slot's or it need not wait.
  void add(GradSlot& slot, const at::Tensor& gradient);
  // slot <- gradient, unscaled, for a slot that lies in place and has fresh memory. run() copies it.
  void copy(const GradSlot& slot, const at::Tensor& gradient) {
    copies_.push_back(slot.in_bucket());
    copied_.push_back(gradient);
  }
  void run();

 private:
  const Direction direction_;
  const double scale_;
  const bool together_;
  std::array<std::vector<kernels::DevicePiece>, kernels::kNumDTypes> pieces_;  // by the gradients' dtype
  std::vector<at::Tensor> gradients_;
  std::vector<at::Tensor> copies_;
  std::vector<at::Tensor> copied_;
  const GradSlot* any_slot_ = nullptr;  // of the bucket
};

}  // namespace torchddp::bucket
