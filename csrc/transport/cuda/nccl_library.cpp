#include "transport/cuda/cuda_device.h"

#ifdef TORCHDDP_WITH_CUDA

#include <c10/cuda/CUDAGuard.h>
#include <nccl.h>

#include <array>
#include <cstring>

#include "transport/cuda/cuda_stream.h"

namespace torchddp::transport {
namespace {

static_assert(ncclSuccess == gpu::kNcclSuccess && ncclInProgress == gpu::kNcclInProgress);
static_assert(sizeof(ncclUniqueId) == sizeof(gpu::UniqueId));

ncclComm_t comm_of(gpu::Comm comm) { return static_cast<ncclComm_t>(comm); }

ncclDataType_t type_of(kernels::DType type) {
  // In the order of kernels::DType; ncclNumTypes, which NCCL refuses, where it has none.
  constexpr std::array kTypes{ncclFloat64, ncclFloat32,  ncclFloat16, ncclBfloat16, ncclInt8,
                              ncclUint8,   ncclNumTypes, ncclInt32,   ncclInt64};
  static_assert(kTypes.size() == kernels::kNumDTypes);
  return kTypes[static_cast<size_t>(type)];
}

// NCCL acts for the thread's current device.
class NcclLibrary final : public gpu::Nccl {
 public:
  explicit NcclLibrary(int index) : index_(static_cast<c10::DeviceIndex>(index)) {}

  int version() override {
    int version = 0;
    return ncclGetVersion(&version) == ncclSuccess ? version : 0;
  }
  int built_version() const override { return NCCL_VERSION_CODE; }
  std::string describe(int result, gpu::Comm comm) override {
    std::string text = ncclGetErrorString(static_cast<ncclResult_t>(result));
    const char* last = ncclGetLastError(comm_of(comm));
    return last == nullptr || *last == '\0' ? text : text + " (" + last + ")";
  }

  int make_id(gpu::UniqueId* id) override {
    ncclUniqueId made;
    const auto result = ncclGetUniqueId(&made);
    std::memcpy(id->bytes.data(), made.internal, id->bytes.size());
    return result;
  }
  int init_rank(gpu::Comm* comm, int size, const gpu::UniqueId& id, int rank) override {
    const c10::cuda::CUDAGuard guard(index_);
    ncclUniqueId given;
    std::memcpy(given.internal, id.bytes.data(), id.bytes.size());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t made = nullptr;
    const auto result = ncclCommInitRankConfig(&made, size, given, rank, &config);
    *comm = made;
    return result;
  }
  int async_error(gpu::Comm comm, int* error) override {
    auto found = ncclSuccess;
    const auto result = ncclCommGetAsyncError(comm_of(comm), &found);
    *error = found;
    return result;
  }
  int finalize(gpu::Comm comm) override { return ncclCommFinalize(comm_of(comm)); }
  int destroy(gpu::Comm comm) override { return ncclCommDestroy(comm_of(comm)); }
  int abort(gpu::Comm comm) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclCommAbort(comm_of(comm));
  }

  int memory_alloc(void** memory, int64_t bytes) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclMemAlloc(memory, static_cast<size_t>(bytes));
  }
  int memory_free(void* memory) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclMemFree(memory);
  }
  // gpu::Communicator asks for windows only if both versions have them.
  int window_register(gpu::Comm comm, void* memory, int64_t bytes, gpu::Window* window) override {
#if NCCL_VERSION_CODE >= 22700
    const c10::cuda::CUDAGuard guard(index_);
    ncclWindow_t made = nullptr;
    const auto result =
        ncclCommWindowRegister(comm_of(comm), memory, static_cast<size_t>(bytes), &made, NCCL_WIN_COLL_SYMMETRIC);
    *window = made;
    return result;
#else
    static_cast<void>(comm), static_cast<void>(memory), static_cast<void>(bytes), static_cast<void>(window);
    return ncclInvalidUsage;
#endif
  }
  int window_deregister(gpu::Comm comm, gpu::Window window) override {
#if NCCL_VERSION_CODE >= 22700
    return ncclCommWindowDeregister(comm_of(comm), static_cast<ncclWindow_t>(window));
#else
    static_cast<void>(comm), static_cast<void>(window);
    return ncclInvalidUsage;
#endif
  }

  int all_reduce(const void* input, void* output, int64_t numel, kernels::DType type, gpu::Comm comm,
                 gpu::Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclAllReduce(input, output, static_cast<size_t>(numel), type_of(type), ncclSum, comm_of(comm),
                         stream_of(stream));
  }
  int reduce(void* data, int64_t numel, kernels::DType type, int root, gpu::Comm comm, gpu::Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclReduce(data, data, static_cast<size_t>(numel), type_of(type), ncclSum, root, comm_of(comm),
                      stream_of(stream));
  }
  int reduce_scatter(const void* input, void* output, int64_t output_numel, kernels::DType type, gpu::Comm comm,
                     gpu::Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclReduceScatter(input, output, static_cast<size_t>(output_numel), type_of(type), ncclSum, comm_of(comm),
                             stream_of(stream));
  }
  int all_gather(const void* input, void* output, int64_t input_numel, kernels::DType type, gpu::Comm comm,
                 gpu::Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclAllGather(input, output, static_cast<size_t>(input_numel), type_of(type), comm_of(comm),
                         stream_of(stream));
  }
  int broadcast(void* data, int64_t numel, kernels::DType type, int root, gpu::Comm comm, gpu::Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclBroadcast(data, data, static_cast<size_t>(numel), type_of(type), root, comm_of(comm), stream_of(stream));
  }

 private:
  c10::DeviceIndex index_;
};

}  // namespace

std::shared_ptr<gpu::Nccl> nccl_library(int index) { return std::make_shared<NcclLibrary>(index); }

}  // namespace torchddp::transport

#else

namespace torchddp::transport {

std::shared_ptr<gpu::Nccl> nccl_library(int) { return nullptr; }

}  // namespace torchddp::transport

#endif
