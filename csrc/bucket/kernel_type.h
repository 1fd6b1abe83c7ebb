// torch's element types as the kernels see them.
#pragma once

#include <c10/core/ScalarType.h>

#include "kernels/dtype.h"
#include "transport/sum_types.h"

namespace torchddp::bucket {

struct KernelType {
  kernels::DType dtype;
  int64_t words;  // kernel elements per tensor element
};

inline KernelType kernel_type(at::ScalarType dtype) {
  using kernels::DType;
  if (at::isComplexType(dtype)) {
    return {*transport::sum_type(c10::toRealValueType(dtype)), 2};
  }
  if (const auto type = transport::sum_type(dtype)) {
    return {*type, 1};
  }
  switch (c10::elementSize(dtype)) {
    case 1:
      return {DType::kU8, 1};
    case 2:
      return {DType::kI16, 1};
    case 4:
      return {DType::kI32, 1};
    default:
      return {DType::kI64, 1};
  }
}

}  // namespace torchddp::bucket
