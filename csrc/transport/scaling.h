// Multiplies floating point or complex tensors by a factor that is not rounded to their type first.
#pragma once

#include <ATen/Functions.h>

namespace torchddp::transport {

// to = from * factor, in one pass, for tensors of one dtype and shape. Tensor::mul_(Scalar) would round the factor to 16 bits on
// the CPU, and the product once more.
inline void scale_into(at::Tensor to, const at::Tensor& from, double factor) {
  auto wrapped = at::scalar_tensor(factor, at::TensorOptions().dtype(at::kDouble));
  wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);  // as a number in Python
  at::mul_out(to, from, wrapped);
}

inline void scale_by(const at::Tensor& values, double factor) { scale_into(values, values, factor); }

// `factor`: one element. On a GPU, Tensor::mul_ would round it to 16 bits.
inline void scale_by(const at::Tensor& values, const at::Tensor& factor) {
  const auto here = factor.to(values.device());
  if (at::isReducedFloatingType(values.scalar_type())) {
    values.copy_(values.to(at::kFloat).mul_(here));
  } else {
    values.mul_(here);
  }
}

}  // namespace torchddp::transport
