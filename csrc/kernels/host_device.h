// Code that both compilers see: g++ (C++20, the CPU kernels and the tests) and nvcc (C++17, the device kernels).
#pragma once

#if defined(__CUDACC__)
#define TDDP_HOST_DEVICE __host__ __device__
#define TDDP_ALWAYS_INLINE __host__ __device__ __forceinline__
#else
#define TDDP_HOST_DEVICE
#define TDDP_ALWAYS_INLINE __attribute__((always_inline)) inline
#endif

// The host's compiler knows no such pragma, not even where nvcc calls it.
#if defined(__CUDA_ARCH__)
#define TDDP_UNROLL _Pragma("unroll")
#define TDDP_NO_UNROLL _Pragma("unroll 1")
#else
#define TDDP_UNROLL
#define TDDP_NO_UNROLL
#endif
