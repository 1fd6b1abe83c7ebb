// Gradients of one bucket that our CUDA kernels can move: collected, then moved in one launch a dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "bucket/grad_slot.h"
#include "kernels/pack_cuda.h"

namespace torchddp::bucket {

class DevicePieces {
 public:
  // Whether there are kernels for this device.
  static bool available(at::Device device);

  // False, and nothing collected, if the gradient's memory is not laid out as the slot's is, or its dtype does not convert.
  bool add(const GradSlot& slot, const at::Tensor& gradient);
  // On the current stream: slots <- gradients * scale.
  void pack(double scale);
  // gradients <- slots
  void unpack();

 private:
  void move(kernels::Direction direction, double scale);

  std::array<std::vector<kernels::DevicePiece>, kernels::kNumDTypes> pieces_;  // by the gradients' dtype
  void* flat_ = nullptr;
  kernels::DType flat_dtype_ = kernels::DType::kF32;
  c10::DeviceIndex device_ = -1;
};

}  // namespace torchddp::bucket
