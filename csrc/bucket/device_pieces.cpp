#include "bucket/device_pieces.h"

#include "common/check.h"

#ifdef TORCHDDP_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchddp::bucket {

bool DevicePieces::add(const GradSlot& slot, const at::Tensor& gradient) {
  const auto piece = slot.piece_of(gradient);
  if (!piece) {
    return false;
  }
  flat_ = slot.flat_data();
  flat_dtype_ = slot.kernel_dtype();
  device_ = slot.device().index();
  pieces_[static_cast<size_t>(piece->dtype)].push_back({piece->data, piece->begin, piece->numel});
  return true;
}

void DevicePieces::pack(double scale) { move(kernels::Direction::kPack, scale); }
void DevicePieces::unpack() { move(kernels::Direction::kUnpack, 1.0); }

#ifdef TORCHDDP_WITH_CUDA

bool DevicePieces::available(at::Device device) { return device.is_cuda(); }

void DevicePieces::move(kernels::Direction direction, double scale) {
  for (size_t dtype = 0; dtype < pieces_.size(); ++dtype) {
    const auto& pieces = pieces_[dtype];
    if (!pieces.empty()) {
      const c10::cuda::CUDAGuard guard(device_);
      C10_CUDA_CHECK(static_cast<cudaError_t>(kernels::move_on_device(
          direction, flat_, flat_dtype_, pieces.data(), static_cast<int64_t>(pieces.size()),
          static_cast<kernels::DType>(dtype), scale, c10::cuda::getCurrentCUDAStream(device_).stream())));
    }
  }
}

#else

bool DevicePieces::available(at::Device) { return false; }
void DevicePieces::move(kernels::Direction, double) { TDDP_INTERNAL(false, "this build has no CUDA kernels"); }

#endif

}  // namespace torchddp::bucket
