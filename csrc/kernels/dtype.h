// Element types as the kernels see them, on the CPU and on a device. For both compilers: g++ (C++20, the CPU kernels and the
// tests) and nvcc (C++17, the device kernels).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TDDP_HOST_DEVICE __host__ __device__
#define TDDP_ALWAYS_INLINE __host__ __device__ __forceinline__
#else
#define TDDP_HOST_DEVICE
#define TDDP_ALWAYS_INLINE __attribute__((always_inline)) inline
#endif

namespace torchddp::kernels {

// A complex tensor is packed as twice as many reals of its component type. Integers are summed and copied, never scaled or
// cast, and what is none of these (bool) is copied as an integer of its size.
enum class DType : uint8_t { kF64, kF32, kF16, kBF16, kI8, kU8, kI16, kI32, kI64 };

inline constexpr int kNumDTypes = 9;
// The floating point types come first, so a DType indexes a table of them.
inline constexpr int kNumFloatTypes = 4;

TDDP_HOST_DEVICE constexpr bool is_float(DType dtype) { return static_cast<int>(dtype) < kNumFloatTypes; }

TDDP_HOST_DEVICE constexpr int64_t item_size(DType dtype) {
  constexpr int64_t kBytes[] = {8, 4, 2, 2, 1, 1, 2, 4, 8};
  return kBytes[static_cast<int>(dtype)];
}

}  // namespace torchddp::kernels
