// torch's element types as the kernels see them.
#pragma once

#include <c10/core/ScalarType.h>

#include "kernels/dtype.h"

namespace torchddp::bucket {

struct KernelType {
  kernels::DType dtype;
  int64_t words;  // kernel elements per tensor element
};

inline KernelType kernel_type(at::ScalarType dtype) {
  using kernels::DType;
  switch (dtype) {
    case at::kDouble:
      return {DType::kF64, 1};
    case at::kFloat:
      return {DType::kF32, 1};
    case at::kHalf:
      return {DType::kF16, 1};
    case at::kBFloat16:
      return {DType::kBF16, 1};
    case at::kComplexDouble:
      return {DType::kF64, 2};
    case at::kComplexFloat:
      return {DType::kF32, 2};
    case at::kComplexHalf:
      return {DType::kF16, 2};
    default:
      break;
  }
  switch (c10::elementSize(dtype)) {
    case 1:
      return {DType::kBytes1, 1};
    case 2:
      return {DType::kBytes2, 1};
    case 4:
      return {DType::kBytes4, 1};
    default:
      return {DType::kBytes8, 1};
  }
}

inline bool is_opaque(kernels::DType dtype) { return !kernels::is_float(dtype); }

}  // namespace torchddp::bucket
