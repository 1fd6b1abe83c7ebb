// torch's dtypes and those that the sum kernels know.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "kernels/sum.h"

namespace torchddp::transport {

inline std::optional<kernels::SumType> sum_type(at::ScalarType dtype) {
  using kernels::SumType;
  switch (dtype) {
    case at::kDouble:
      return SumType::kF64;
    case at::kFloat:
      return SumType::kF32;
    case at::kHalf:
      return SumType::kF16;
    case at::kBFloat16:
      return SumType::kBF16;
    case at::kChar:
      return SumType::kI8;
    case at::kByte:
      return SumType::kU8;
    case at::kShort:
      return SumType::kI16;
    case at::kInt:
      return SumType::kI32;
    case at::kLong:
      return SumType::kI64;
    default:
      return std::nullopt;
  }
}

inline at::ScalarType scalar_type(kernels::SumType type) {
  constexpr at::ScalarType kTypes[] = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kChar,
                                       at::kByte,   at::kShort, at::kInt,  at::kLong};
  return kTypes[static_cast<size_t>(type)];
}

}  // namespace torchddp::transport
