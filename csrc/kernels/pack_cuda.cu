// The launches of pack_cuda.h. What a thread does stands in pack_device_body.h, which launches there are in pack_device_plan.h.
#include "kernels/pack_cuda.h"

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/pack_device_body.h"
#include "kernels/pack_device_plan.h"

namespace torchddp::kernels {
namespace device {
namespace {

static_assert(kInvalidValue == cudaErrorInvalidValue, "the host code returns CUDA's error");

// Blocks that fit a multiprocessor at once, at least. Left to itself, or asked for more, nvcc 13.0 spills registers of some kernels.
constexpr int kMinBlocks = 2;

// Adds up the threads' statistics; the total is in `sums[0]`, for thread 0 only.
__device__ __forceinline__ void fold(Partial* sums, Partial own) {
  sums[threadIdx.x] = own;
  for (int stride = kThreads / 2; stride > 0; stride /= 2) {
    __syncthreads();
    fold_step(sums, static_cast<int>(threadIdx.x), stride);
  }
}

// __grid_constant__: the table is read where the parameters lie. Without it, indexing would copy it to every thread's stack.
template <DType Dst, DType Src, bool kCopy, bool kStats, int kCapacity>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    pack_kernel(const __grid_constant__ PieceTable<kCapacity> table) {
  Partial stats{0, 0};
  Pack<Dst, Src, kCopy, kStats>::run_thread(table, gridDim.x, blockIdx.x, static_cast<int>(threadIdx.x), stats);
  if constexpr (kStats) {
    __shared__ Partial sums[kThreads];
    fold(sums, stats);
    if (threadIdx.x == 0) table.partials[blockIdx.x] = sums[0];
  }
}

// One block adds up the partial sums. A launch of its own rather than the last block of the pack kernel: no counter
// has to be zero beforehand, so an aborted launch leaves nothing behind.
__global__ void __launch_bounds__(kThreads) total_kernel(const Partial* partials, int64_t count, DeviceStats* stats) {
  __shared__ Partial sums[kThreads];
  fold(sums, add_partials(partials, count, static_cast<int>(threadIdx.x)));
  if (threadIdx.x == 0) {
    stats->sum_squares = sums[0].sum_squares;
    stats->non_finite = static_cast<double>(sums[0].non_finite);
  }
}

template <int kCapacity>
using Kernel = void (*)(PieceTable<kCapacity>);

template <DType Dst, bool kStats, int kCapacity>
Kernel<kCapacity> casting_kernel(DType src_type) {
  switch (src_type) {
    case DType::kF64:
      return pack_kernel<Dst, DType::kF64, false, kStats, kCapacity>;
    case DType::kF32:
      return pack_kernel<Dst, DType::kF32, false, kStats, kCapacity>;
    case DType::kF16:
      return pack_kernel<Dst, DType::kF16, false, kStats, kCapacity>;
    default:
      return pack_kernel<Dst, DType::kBF16, false, kStats, kCapacity>;
  }
}

template <bool kStats, int kCapacity>
Kernel<kCapacity> casting_kernel(DType dst_type, DType src_type) {
  switch (dst_type) {
    case DType::kF64:
      return casting_kernel<DType::kF64, kStats, kCapacity>(src_type);
    case DType::kF32:
      return casting_kernel<DType::kF32, kStats, kCapacity>(src_type);
    case DType::kF16:
      return casting_kernel<DType::kF16, kStats, kCapacity>(src_type);
    default:
      return casting_kernel<DType::kBF16, kStats, kCapacity>(src_type);
  }
}

// What is only copied needs its type for the statistics alone.
template <bool kStats, int kCapacity>
Kernel<kCapacity> copying_kernel(DType dtype) {
  if constexpr (kStats) {
    switch (dtype) {
      case DType::kF64:
        return pack_kernel<DType::kF64, DType::kF64, true, true, kCapacity>;
      case DType::kF32:
        return pack_kernel<DType::kF32, DType::kF32, true, true, kCapacity>;
      case DType::kF16:
        return pack_kernel<DType::kF16, DType::kF16, true, true, kCapacity>;
      default:
        return pack_kernel<DType::kBF16, DType::kBF16, true, true, kCapacity>;
    }
  } else {
    switch (item_size(dtype)) {
      case 1:
        return pack_kernel<DType::kU8, DType::kU8, true, false, kCapacity>;
      case 2:
        return pack_kernel<DType::kI16, DType::kI16, true, false, kCapacity>;
      case 4:
        return pack_kernel<DType::kI32, DType::kI32, true, false, kCapacity>;
      default:
        return pack_kernel<DType::kI64, DType::kI64, true, false, kCapacity>;
    }
  }
}

template <bool kStats, int kCapacity>
Kernel<kCapacity> kernel_for(const Job& job) {
  return job.is_copy() ? copying_kernel<kStats, kCapacity>(job.dst_type())
                       : casting_kernel<kStats, kCapacity>(job.dst_type(), job.src_type());
}

template <int kCapacity>
int launch(const Job& job, PieceTable<kCapacity>& table, uint32_t num_blocks, cudaStream_t stream) {
  const Kernel<kCapacity> kernel = job.stats ? kernel_for<true, kCapacity>(job) : kernel_for<false, kCapacity>(job);
  void* arguments[] = {&table};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(num_blocks), dim3(kThreads), arguments, 0,
                          stream);
}

int run(const Job& job, DeviceStats* stats, void* scratch, void* stream_handle) {
  if (job.stats && scratch == nullptr) return cudaErrorInvalidValue;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const Partial* partials = static_cast<const Partial*>(scratch);
  int64_t num_partials = 0;
  const int error =
      for_each_launch(job, job.stats ? static_cast<Partial*>(scratch) : nullptr, num_partials,
                      [&](auto& table, uint32_t num_blocks) { return launch(job, table, num_blocks, stream); });
  if (error != cudaSuccess || !job.stats) return error;
  void* arguments[] = {&partials, &num_partials, &stats};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&total_kernel), dim3(1), dim3(kThreads), arguments, 0, stream);
}

}  // namespace
}  // namespace device

using device::Direction;
using device::Job;

int64_t device_scratch_bytes(int64_t count) {
  return device::num_launches(count > 0 ? count : 1) * device::kMaxBlocks *
         static_cast<int64_t>(sizeof(device::Partial));
}

int pack_on_device(void* flat, DType flat_type, const DevicePiece* pieces, int64_t count, DType outside_type,
                   double scale, DeviceStats* stats, void* scratch, void* stream) {
  const Job job{Direction::kPack, flat, flat_type, pieces, count, outside_type, scale, stats != nullptr};
  return device::run(job, stats, scratch, stream);
}

int unpack_on_device(const void* flat, DType flat_type, const DevicePiece* pieces, int64_t count, DType outside_type,
                     double scale, DeviceStats* stats, void* scratch, void* stream) {
  const Job job{Direction::kUnpack, flat, flat_type, pieces, count, outside_type, scale, stats != nullptr};
  return device::run(job, stats, scratch, stream);
}

}  // namespace torchddp::kernels
