#include "bucket/device_pack.h"

#include "common/check.h"

#ifdef TORCHDDP_WITH_CUDA

#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "bucket/kernel_type.h"
#include "kernels/pack_cuda.h"

namespace torchddp::bucket {
namespace {

void check_flat(const at::Tensor& flat) {
  TDDP_CHECK(flat.is_cuda(), "flat must be a CUDA tensor, got one on ", flat.device());
  TDDP_CHECK(flat.dim() == 1 && flat.is_contiguous(), "flat must be contiguous and have one dimension, got sizes ",
             flat.sizes(), " with strides ", flat.strides());
}

void check_tensor(const at::Tensor& flat, const at::Tensor& first, const at::Tensor& tensor, int64_t offset, size_t k) {
  TDDP_CHECK(tensor.device() == flat.device(), "tensors[", k, "] is on ", tensor.device(), ", flat on ", flat.device(),
             ": all must be on one device");
  TDDP_CHECK(tensor.scalar_type() == first.scalar_type(), "tensors[", k, "] is ", tensor.scalar_type(),
             ", tensors[0] is ", first.scalar_type(), ": give tensors of one dtype per call");
  TDDP_CHECK(tensor.is_contiguous(), "tensors[", k, "] must be contiguous, got sizes ", tensor.sizes(),
             " with strides ", tensor.strides());
  TDDP_CHECK(offset >= 0 && tensor.numel() <= flat.numel() && offset <= flat.numel() - tensor.numel(), "tensors[", k,
             "] has ", tensor.numel(), " elements, which at offset ", offset, " do not lie within flat's ",
             flat.numel());
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  TDDP_CHECK(address % static_cast<uintptr_t>(kernels::item_size(kernel_type(tensor.scalar_type()).dtype)) == 0,
             "tensors[", k, "] is not aligned to its element size");
}

void check_types(at::ScalarType flat, at::ScalarType outside, double scale, bool stats) {
  const auto flat_type = kernel_type(flat);
  const auto outside_type = kernel_type(outside);
  TDDP_CHECK(flat_type.words == outside_type.words, "complex and real numbers can't be cast into each other, got ",
             outside, " tensors and ", flat, " flat memory");
  if (kernels::is_float(flat_type.dtype) && kernels::is_float(outside_type.dtype)) return;
  TDDP_CHECK(flat == outside && scale == 1.0 && !stats,
             "only floating point tensors can be scaled, cast or measured, got ", outside, " tensors, ", flat,
             " flat memory, scale ", scale, stats ? " and stats" : "");
}

void check_stats(const at::Tensor& flat, const at::Tensor& stats) {
  TDDP_CHECK(stats.device() == flat.device() && stats.scalar_type() == at::kDouble && stats.numel() == 2 &&
                 stats.is_contiguous(),
             "stats must be a contiguous float64 tensor of 2 elements on ", flat.device(), ", got ", stats.numel(),
             " elements of ", stats.scalar_type(), " on ", stats.device());
}

// What both directions have in common. `launch` is called with the arguments of the kernels.
template <class Launch>
void run(const char* name, const at::Tensor& flat, const std::vector<at::Tensor>& tensors,
         const std::vector<int64_t>& offsets, double scale, const std::optional<at::Tensor>& stats,
         const Launch& launch) {
  check_flat(flat);
  TDDP_CHECK(tensors.size() == offsets.size(), "got ", tensors.size(), " tensors and ", offsets.size(),
             " offsets: each tensor needs one");
  const auto outside = tensors.empty() ? flat.scalar_type() : tensors[0].scalar_type();
  check_types(flat.scalar_type(), outside, scale, stats.has_value());
  if (stats.has_value()) check_stats(flat, *stats);
  const auto flat_type = kernel_type(flat.scalar_type());
  const auto outside_type = kernel_type(outside);
  std::vector<kernels::DevicePiece> pieces;
  pieces.reserve(tensors.size());
  for (size_t k = 0; k < tensors.size(); ++k) {
    check_tensor(flat, tensors[0], tensors[k], offsets[k], k);
    pieces.push_back({tensors[k].data_ptr(), offsets[k] * flat_type.words, tensors[k].numel() * outside_type.words});
  }

  const c10::cuda::CUDAGuard guard(flat.device());
  const auto count = static_cast<int64_t>(pieces.size());
  kernels::DeviceStats* device_stats = nullptr;
  at::Tensor scratch;
  if (stats.has_value()) {
    device_stats = static_cast<kernels::DeviceStats*>(stats->data_ptr());
    // Freed before the kernels have run: the allocator gives it only to work that comes later on this stream.
    scratch = at::empty({kernels::device_scratch_bytes(count)}, flat.options().dtype(at::kByte));
  }
  const auto stream = c10::cuda::getCurrentCUDAStream(flat.device().index());
  const int error = launch(flat.data_ptr(), flat_type.dtype, pieces.data(), count, outside_type.dtype, scale,
                           device_stats, scratch.defined() ? scratch.data_ptr() : nullptr, stream.stream());
  if (error != 0) {
    static_cast<void>(cudaGetLastError());  // so that torch does not report it again, somewhere else
  }
  TDDP_CHECK(error == 0, name, ": CUDA reports error ", error, " (", kernels::device_error_string(error), ")");
}

}  // namespace

void pack_on_device(const at::Tensor& flat, const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& offsets,
                    double scale, const std::optional<at::Tensor>& stats) {
  run("pack_on_device", flat, tensors, offsets, scale, stats, kernels::pack_on_device);
}

void unpack_on_device(const at::Tensor& flat, const std::vector<at::Tensor>& tensors,
                      const std::vector<int64_t>& offsets, double scale, const std::optional<at::Tensor>& stats) {
  run("unpack_on_device", flat, tensors, offsets, scale, stats, kernels::unpack_on_device);
}

}  // namespace torchddp::bucket

#else

namespace torchddp::bucket {
namespace {

[[noreturn]] void throw_without_cuda(const char* name) {
  throw std::runtime_error(c10::str(name,
                                    ": this torchddp was built without CUDA; install a CUDA wheel, or build with ",
                                    "TORCHDDP_CUDA=1 against a CUDA build of torch"));
}

}  // namespace

void pack_on_device(const at::Tensor& /*flat*/, const std::vector<at::Tensor>& /*tensors*/,
                    const std::vector<int64_t>& /*offsets*/, double /*scale*/,
                    const std::optional<at::Tensor>& /*stats*/) {
  throw_without_cuda("pack_on_device");
}

void unpack_on_device(const at::Tensor& /*flat*/, const std::vector<at::Tensor>& /*tensors*/,
                      const std::vector<int64_t>& /*offsets*/, double /*scale*/,
                      const std::optional<at::Tensor>& /*stats*/) {
  throw_without_cuda("unpack_on_device");
}

}  // namespace torchddp::bucket

#endif
