// The launches of pack_cuda.h. pack_device_body.h has the work of one thread, pack_device_plan.h plans the launches.
#include "kernels/pack_cuda.h"

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/pack_device_body.h"
#include "kernels/pack_device_plan.h"

namespace torchddp::kernels {
namespace device {
namespace {

static_assert(kInvalidValue == cudaErrorInvalidValue, "the host code returns CUDA's error");

// Minimum number of resident blocks per multiprocessor. With nvcc 13.0's own choice, or a higher number, some kernels spill
// registers.
constexpr int kMinBlocks = 2;

// __grid_constant__ lets the table be read where the parameters are. Without it, indexing would copy it to every thread's
// stack.
template <class Pack, int kCapacity>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    pack_kernel(const __grid_constant__ PieceTable<kCapacity> table) {
  Pack::run_thread(table, gridDim.x, blockIdx.x, static_cast<int>(threadIdx.x));
}

template <int kCapacity>
int launch(const PackJob& job, PieceTable<kCapacity>& table, uint32_t num_blocks, cudaStream_t stream) {
  using Kernel = void (*)(PieceTable<kCapacity>);
  const Kernel kernel = visit_kernel(job, [](auto pack) -> Kernel { return pack_kernel<decltype(pack), kCapacity>; });
  void* arguments[] = {&table};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(num_blocks), dim3(kThreads), arguments, 0,
                          stream);
}

}  // namespace
}  // namespace device

int move_on_device(Direction direction, void* flat, DType flat_type, const DevicePiece* pieces, int64_t count,
                   DType outside_type, double scale, void* stream) {
  const device::PackJob job{direction, flat, flat_type, pieces, count, outside_type, scale};
  return device::for_each_launch(job, [&](auto& table, uint32_t num_blocks) {
    return device::launch(job, table, num_blocks, static_cast<cudaStream_t>(stream));
  });
}

int find_kernels() {
  // Parameters of more than 4 KB need the driver of CUDA 12.1. To an older one of CUDA 12 our kernels are what too new PTX is.
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver < 12010) return cudaErrorUnsupportedPtxVersion;
  constexpr auto kernel = device::pack_kernel<device::Pack<DType::kU8, DType::kU8>, device::kMaxPieces>;
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  static_cast<void>(cudaGetLastError());  // so that torch does not report it again elsewhere
  return error;
}

}  // namespace torchddp::kernels
