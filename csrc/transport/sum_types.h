// Maps torch's dtypes to the kernels' types.
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <bit>
#include <optional>

#include "kernels/dtype.h"

namespace torchddp::transport {

// The dtypes that the kernels sum, in the order of kernels::DType.
inline constexpr std::array kSumTypes{at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kChar,
                                      at::kByte,   at::kShort, at::kInt,  at::kLong};

inline std::optional<kernels::DType> sum_type(at::ScalarType dtype) {
  const auto found = std::ranges::find(kSumTypes, dtype);
  return found == kSumTypes.end() ? std::nullopt
                                  : std::optional(static_cast<kernels::DType>(found - kSumTypes.begin()));
}

inline at::ScalarType scalar_type(kernels::DType type) { return kSumTypes[static_cast<size_t>(type)]; }

// What the kernels pack: everything.
struct KernelType {
  kernels::DType dtype;
  int64_t words;  // kernel elements per tensor element
};

inline KernelType kernel_type(at::ScalarType dtype) {
  using kernels::DType;
  if (at::isComplexType(dtype)) return {*sum_type(c10::toRealValueType(dtype)), 2};
  if (const auto type = sum_type(dtype)) return {*type, 1};
  constexpr DType kOpaque[] = {DType::kU8, DType::kI16, DType::kI32, DType::kI64};  // by size
  return {kOpaque[std::countr_zero(c10::elementSize(dtype))], 1};
}

}  // namespace torchddp::transport
