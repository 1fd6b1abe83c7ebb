#include "bucket/device_pieces.h"

#include "bucket/pieces_by_operators.h"

#ifdef TORCHDDP_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "gpu/kernel_probe.h"
#endif

namespace torchddp::bucket {
namespace {

#ifdef TORCHDDP_WITH_CUDA

// For the current device.
void warn_without_kernels(int device, cudaError_t error) {
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  TORCH_WARN(
      "torchddp has no kernels that run on ", properties.name, " (cuda:", device, ", compute capability ",
      properties.major, ".", properties.minor, "): ", cudaGetErrorString(error),
      ". torch's operators move gradients into buckets instead, with the same results in more launches. A build of "
      "torchddp with -DCMAKE_CUDA_ARCHITECTURES=",
      properties.major, properties.minor, " has kernels for it.");
}

// Whether our kernels run on the current device. The first time it warns if they don't.
bool has_kernels(at::Device device) {
  if (!device.is_cuda()) {
    return false;
  }
  static gpu::KernelProbe probe;
  const auto find = [] {
    const auto error = static_cast<cudaError_t>(kernels::find_kernels());
    if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction &&
        error != cudaErrorInvalidKernelImage && error != cudaErrorUnsupportedPtxVersion) {
      C10_CUDA_CHECK(error);  // left by something else: the model's kernels, or a capture
    }
    return static_cast<int>(error);
  };
  return probe.runs_on(device.index(), find,
                       [&](int error) { warn_without_kernels(device.index(), static_cast<cudaError_t>(error)); });
}

#endif

void move_pieces(kernels::Direction direction, const GradSlot& slot, std::span<const kernels::DevicePiece> pieces,
                 kernels::DType dtype, double scale) {
#ifdef TORCHDDP_WITH_CUDA
  const c10::cuda::OptionalCUDAGuard guard(slot.device().is_cuda() ? std::optional(slot.device()) : std::nullopt);
  if (has_kernels(slot.device())) {
    C10_CUDA_CHECK(static_cast<cudaError_t>(
        kernels::move_on_device(direction, slot.flat_data(), slot.kernel_dtype(), pieces.data(), std::ssize(pieces),
                                dtype, scale, c10::cuda::getCurrentCUDAStream(slot.device().index()).stream())));
    return;
  }
#endif
  move_by_operators(direction, slot, pieces, dtype, scale);
}

}  // namespace

void DevicePieces::add(GradSlot& slot, const at::Tensor& gradient) {
  const bool pack = direction_ == Direction::kPack;
  const bool waits = slot.device().is_cuda() || (together_ && slot.device().is_cpu());
  // A gradient that lies elsewhere in the bucket would be overwritten before it is read.
  const auto outside = waits && pack && slot.overlaps(gradient) && !slot.holds(gradient) ? gradient.clone() : gradient;
  if (const auto piece = waits ? slot.piece_of(outside) : std::nullopt) {
    pieces_[static_cast<size_t>(piece->dtype)].push_back(piece->memory);
    gradients_.push_back(outside);
    any_slot_ = &slot;
  } else if (pack) {
    slot.pack(gradient, scale_);
  } else {
    slot.unpack(gradient);
  }
}

void DevicePieces::run() {
  for (size_t dtype = 0; dtype < pieces_.size(); ++dtype) {
    if (!pieces_[dtype].empty()) {
      move_pieces(direction_, *any_slot_, pieces_[dtype], static_cast<kernels::DType>(dtype), scale_);
    }
  }
}

}  // namespace torchddp::bucket
