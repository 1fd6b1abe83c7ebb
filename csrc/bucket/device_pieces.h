// Gradients into or out of the slots of one bucket: on CUDA together, in one launch a dtype.
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

  explicit DevicePieces(Direction direction, double scale = 1.0) : direction_(direction), scale_(scale) {}

  // slot <- gradient * scale, or gradient <- slot: any gradient of the slot's shape. Moved by run(), which it lives to see, unless our
  // kernels can't: then at once.
  void add(GradSlot& slot, const at::Tensor& gradient);
  void run();

 private:
  // Our kernels are for its device.
  static bool has_kernels(at::Device device);

  const Direction direction_;
  const double scale_;
  std::array<std::vector<kernels::DevicePiece>, kernels::kNumDTypes> pieces_;  // by the gradients' dtype
  std::vector<at::Tensor> gradients_;
  const GradSlot* any_slot_ = nullptr;  // of the bucket
};

}  // namespace torchddp::bucket
