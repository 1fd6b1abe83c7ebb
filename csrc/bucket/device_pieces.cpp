#include "bucket/device_pieces.h"

#include <ATen/Functions.h>

#include "bucket/kernel_type.h"
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

#ifdef TORCHDDP_WITH_CUDA

namespace {

template <typename Launch>
void launch(c10::DeviceIndex device, Launch&& body) {
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(static_cast<cudaError_t>(body(c10::cuda::getCurrentCUDAStream(device).stream())));
}

}  // namespace

bool DevicePieces::available(at::Device device) { return device.is_cuda(); }

void DevicePieces::pack(double scale) {
  for (size_t dtype = 0; dtype < pieces_.size(); ++dtype) {
    const auto& pieces = pieces_[dtype];
    if (!pieces.empty()) {
      launch(device_, [&](void* stream) {
        return kernels::pack_on_device(flat_, flat_dtype_, pieces.data(), static_cast<int64_t>(pieces.size()),
                                       static_cast<kernels::DType>(dtype), scale, nullptr, nullptr, stream);
      });
    }
  }
}

void DevicePieces::unpack() {
  for (size_t dtype = 0; dtype < pieces_.size(); ++dtype) {
    const auto& pieces = pieces_[dtype];
    if (!pieces.empty()) {
      launch(device_, [&](void* stream) {
        return kernels::unpack_on_device(flat_, flat_dtype_, pieces.data(), static_cast<int64_t>(pieces.size()),
                                         static_cast<kernels::DType>(dtype), 1.0, nullptr, nullptr, stream);
      });
    }
  }
}

void DevicePieces::measure(const at::Tensor& flat, const at::Tensor& stats) {
  const auto dtype = kernel_type(flat.scalar_type()).dtype;
  // In place, unscaled: values are read, and written back as they are.
  const kernels::DevicePiece all{flat.mutable_data_ptr(), 0, flat.numel()};
  const auto scratch = at::empty({kernels::device_scratch_bytes(1)}, stats.options().dtype(at::kByte));
  launch(flat.device().index(), [&](void* stream) {
    return kernels::pack_on_device(all.outside, dtype, &all, 1, dtype, 1.0,
                                   static_cast<kernels::DeviceStats*>(stats.mutable_data_ptr()),
                                   scratch.mutable_data_ptr(), stream);
  });
}

#else

bool DevicePieces::available(at::Device) { return false; }
void DevicePieces::pack(double) { TDDP_INTERNAL(false, "this build has no CUDA kernels"); }
void DevicePieces::unpack() { TDDP_INTERNAL(false, "this build has no CUDA kernels"); }
void DevicePieces::measure(const at::Tensor&, const at::Tensor&) {
  TDDP_INTERNAL(false, "this build has no CUDA kernels");
}

#endif

}  // namespace torchddp::bucket
