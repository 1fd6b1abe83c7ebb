// torch's dtypes and those that the kernels sum.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "kernels/dtype.h"

namespace torchddp::transport {

inline std::optional<kernels::DType> sum_type(at::ScalarType dtype) {
  using kernels::DType;
  switch (dtype) {
    case at::kDouble:
      return DType::kF64;
    case at::kFloat:
      return DType::kF32;
    case at::kHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kChar:
      return DType::kI8;
    case at::kByte:
      return DType::kU8;
    case at::kShort:
      return DType::kI16;
    case at::kInt:
      return DType::kI32;
    case at::kLong:
      return DType::kI64;
    default:
      return std::nullopt;
  }
}

inline at::ScalarType scalar_type(kernels::DType type) {
  constexpr at::ScalarType kTypes[] = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kChar,
                                       at::kByte,   at::kShort, at::kInt,  at::kLong};
  return kTypes[static_cast<size_t>(type)];
}

}  // namespace torchddp::transport
