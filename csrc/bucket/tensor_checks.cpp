#include "bucket/tensor_checks.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>

#include "bucket/parallel.h"
#include "common/check.h"
#include "kernels/hash.h"
#include "kernels/pack.h"
#include "transport/sum_types.h"

namespace torchddp::bucket {
namespace {

at::Tensor plain_values(const at::Tensor& tensor) {
  auto values = tensor.detach().resolve_conj().resolve_neg();
  return values.is_complex() ? at::view_as_real(values) : values;
}

}  // namespace

int64_t count_non_finite(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  if (!tensor.is_floating_point() && !tensor.is_complex()) return 0;
  auto values = plain_values(tensor);
  const auto dtype = transport::kernel_type(values.scalar_type()).dtype;
  if (!values.device().is_cpu() || !kernels::is_float(dtype)) {  // opaque: a float type that the kernels don't know
    return values.isfinite().logical_not().sum().item<int64_t>();
  }
  if (!values.is_non_overlapping_and_dense()) values = values.contiguous();
  const auto* const data = static_cast<const std::byte*>(values.const_data_ptr());
  return sum_of_parts(values.numel(), [&](int64_t begin, int64_t end) {
    return kernels::count_non_finite(data + begin * kernels::item_size(dtype), dtype, end - begin);
  });
}

double sum_of_squares(const at::Tensor& tensor) {
  constexpr int64_t kChunk = 1024;  // in doubles, half of the first-level cache at most
  constexpr int64_t kLanes = 16;
  const auto dtype = transport::kernel_type(tensor.scalar_type()).dtype;
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  double sum = 0;
  for (int64_t begin = 0; begin < tensor.numel(); begin += kChunk) {
    const int64_t count = std::min(kChunk, tensor.numel() - begin);
    double values[kChunk];
    kernels::scale_cast(values, kernels::DType::kF64, data + begin * kernels::item_size(dtype), dtype, count, 1.0);
    std::fill(values + count, values + kChunk, 0.0);
    double lanes[kLanes] = {};
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += values[i + lane] * values[i + lane];
    }
    for (int64_t stride = kLanes / 2; stride > 0; stride /= 2) {
      for (int64_t lane = 0; lane < stride; ++lane) lanes[lane] += lanes[lane + stride];
    }
    sum += lanes[0];
  }
  return sum;
}

int64_t hash_tensor(const at::Tensor& tensor) {
  TDDP_CHECK(tensor.is_cpu() && tensor.is_contiguous(), "hash_tensor wants a contiguous CPU tensor, got strides ",
             tensor.strides(), " on ", tensor.device());
  return static_cast<int64_t>(kernels::hash_bytes(tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes())));
}

}  // namespace torchddp::bucket
