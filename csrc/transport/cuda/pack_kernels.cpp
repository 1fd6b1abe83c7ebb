// Launches the pack kernels where there are some for the device.
#include "transport/cuda/cuda_device.h"

#ifdef TORCHDDP_WITH_CUDA

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "gpu/kernel_probe.h"

namespace torchddp::transport {
namespace {

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

}  // namespace

bool move_by_kernels(kernels::Direction direction, void* flat, kernels::DType flat_type,
                     std::span<const kernels::DevicePiece> pieces, kernels::DType outside_type, double scale,
                     at::Device device) {
  if (!device.is_cuda()) return false;
  const c10::cuda::CUDAGuard guard(device);
  if (!has_kernels(device)) return false;
  C10_CUDA_CHECK(static_cast<cudaError_t>(
      kernels::move_on_device(direction, flat, flat_type, pieces.data(), std::ssize(pieces), outside_type, scale,
                              c10::cuda::getCurrentCUDAStream(device.index()).stream())));
  return true;
}

}  // namespace torchddp::transport

#endif
