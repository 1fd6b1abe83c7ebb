#include "bucket/tensor_checks.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include "bucket/parallel.h"
#include "common/check.h"
#include "kernels/hash.h"
#include "kernels/non_finite.h"
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
  if (!tensor.is_floating_point() && !tensor.is_complex()) {
    return 0;
  }
  auto values = plain_values(tensor);
  const auto dtype = transport::kernel_type(values.scalar_type()).dtype;
  if (!values.device().is_cpu() || !kernels::is_float(dtype)) {  // opaque: a float type that the kernels don't know
    return values.isfinite().logical_not().sum().item<int64_t>();
  }
  if (!values.is_non_overlapping_and_dense()) {
    values = values.contiguous();
  }
  const auto* const data = static_cast<const std::byte*>(values.const_data_ptr());
  return sum_of_parts(values.numel(), [&](int64_t begin, int64_t end) {
    return kernels::count_non_finite(data + begin * kernels::item_size(dtype), dtype, end - begin);
  });
}

int64_t hash_tensor(const at::Tensor& tensor) {
  TDDP_CHECK(tensor.is_cpu() && tensor.is_contiguous(), "hash_tensor wants a contiguous CPU tensor, got strides ",
             tensor.strides(), " on ", tensor.device());
  return static_cast<int64_t>(kernels::hash_bytes(tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes())));
}

}  // namespace torchddp::bucket
