#include "bucket/device_pieces.h"

#include <ATen/Functions.h>

#include "common/check.h"
#include "transport/sum_types.h"

#ifdef TORCHDDP_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchddp::bucket {

void DevicePieces::add(GradSlot& slot, const at::Tensor& gradient) {
  if (const auto piece = available(slot.device()) ? slot.piece_of(gradient) : std::nullopt) {
    pieces_[static_cast<size_t>(piece->dtype)].push_back(piece->memory);
    gradients_.push_back(gradient);
    any_slot_ = &slot;
  } else if (way_ == Way::kPack) {
    slot.pack(gradient, scale_);
  } else {
    slot.unpack(gradient);
  }
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

void DevicePieces::run() {
  for (size_t dtype = 0; dtype < pieces_.size(); ++dtype) {
    const auto& pieces = pieces_[dtype];
    if (!pieces.empty()) {
      launch(any_slot_->device().index(), [&](void* stream) {
        const auto move = [&](auto* kernel) {
          return kernel(any_slot_->flat_data(), any_slot_->kernel_dtype(), pieces.data(),
                        static_cast<int64_t>(pieces.size()), static_cast<kernels::DType>(dtype), scale_, nullptr,
                        nullptr, stream);
        };
        return way_ == Way::kPack ? move(&kernels::pack_on_device) : move(&kernels::unpack_on_device);
      });
    }
  }
}

void DevicePieces::measure(const at::Tensor& flat, const at::Tensor& stats) {
  const auto dtype = transport::kernel_type(flat.scalar_type()).dtype;
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
void DevicePieces::run() {}
void DevicePieces::measure(const at::Tensor&, const at::Tensor&) {
  TDDP_INTERNAL(false, "this build has no CUDA kernels");
}

#endif

}  // namespace torchddp::bucket
