// Element types as the kernels see them, on the CPU and on a device.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace torchddp::kernels {

// A complex tensor is packed as twice as many reals of its component type. kBytes1..kBytes8 are opaque words (integers,
// bool): they can be copied, never scaled or cast.
enum class DType : uint8_t { kF64, kF32, kF16, kBF16, kBytes1, kBytes2, kBytes4, kBytes8 };

// Only the floating point types can be scaled and cast; they come first in DType, so a DType indexes a table of them.
inline constexpr int kNumFloatTypes = 4;

TDDP_HOST_DEVICE constexpr bool is_float(DType dtype) { return static_cast<int>(dtype) < kNumFloatTypes; }

TDDP_HOST_DEVICE constexpr int64_t item_size(DType dtype) {
  switch (dtype) {
    case DType::kBytes1:
      return 1;
    case DType::kF16:
    case DType::kBF16:
    case DType::kBytes2:
      return 2;
    case DType::kF32:
    case DType::kBytes4:
      return 4;
    case DType::kF64:
    case DType::kBytes8:
      break;
  }
  return 8;
}

}  // namespace torchddp::kernels
