#include "bucket/device_pieces.h"

#ifdef TORCHDDP_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchddp::bucket {

void DevicePieces::add(GradSlot& slot, const at::Tensor& gradient) {
  if (const auto piece = has_kernels(slot.device()) ? slot.piece_of(gradient) : std::nullopt) {
    pieces_[static_cast<size_t>(piece->dtype)].push_back(piece->memory);
    gradients_.push_back(gradient);
    any_slot_ = &slot;
  } else if (direction_ == Direction::kPack) {
    slot.pack(gradient, scale_);
  } else {
    slot.unpack(gradient);
  }
}

#ifdef TORCHDDP_WITH_CUDA

bool DevicePieces::has_kernels(at::Device device) { return device.is_cuda(); }

void DevicePieces::run() {
  for (size_t dtype = 0; dtype < pieces_.size(); ++dtype) {
    const auto& pieces = pieces_[dtype];
    if (!pieces.empty()) {
      const auto device = any_slot_->device().index();
      const c10::cuda::CUDAGuard guard(device);
      C10_CUDA_CHECK(static_cast<cudaError_t>(
          kernels::move_on_device(direction_, any_slot_->flat_data(), any_slot_->kernel_dtype(), pieces.data(),
                                  static_cast<int64_t>(pieces.size()), static_cast<kernels::DType>(dtype), scale_,
                                  c10::cuda::getCurrentCUDAStream(device).stream())));
    }
  }
}

#else

bool DevicePieces::has_kernels(at::Device) { return false; }
void DevicePieces::run() {}

#endif

}  // namespace torchddp::bucket
