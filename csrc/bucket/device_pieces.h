// Gradients into or out of the slots of one bucket: on CUDA together, in one launch a dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "bucket/grad_slot.h"

namespace torchddp::bucket {

// Works on the current stream.
class DevicePieces {
 public:
  enum class Way : uint8_t { kPack, kUnpack };

  explicit DevicePieces(Way way, double scale = 1.0) : way_(way), scale_(scale) {}

  // slot <- gradient * scale, or gradient <- slot: any gradient of the slot's shape. Moved by run(), which it lives to see, unless our
  // kernels can't: then at once.
  void add(GradSlot& slot, const at::Tensor& gradient);
  void run();

  // Whether there are kernels for this device.
  static bool available(at::Device device);
  // What is in all of `flat`, a bucket's memory of a floating point dtype: {sum of squares, values that are not finite} into
  // `stats`, two doubles on the device.
  static void measure(const at::Tensor& flat, const at::Tensor& stats);

 private:
  const Way way_;
  const double scale_;
  std::array<std::vector<kernels::DevicePiece>, kernels::kNumDTypes> pieces_;  // by the gradients' dtype
  std::vector<at::Tensor> gradients_;
  const GradSlot* any_slot_ = nullptr;  // of the bucket
};

}  // namespace torchddp::bucket
