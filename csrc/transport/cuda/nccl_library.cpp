#include "transport/cuda/cuda_device.h"

#ifdef TORCHDDP_WITH_CUDA

#include <c10/cuda/CUDAGuard.h>
#include <nccl.h>

#include <array>
#include <cstring>

#include "kernels/pack.h"

namespace torchddp::transport {
namespace {

static_assert(ncclSuccess == gpu::kNcclSuccess && ncclInProgress == gpu::kNcclInProgress);
static_assert(ncclSum == gpu::kPlainSum);
static_assert(sizeof(ncclUniqueId) == sizeof(gpu::UniqueId));

ncclComm_t comm_of(gpu::Comm comm) { return static_cast<ncclComm_t>(comm); }

ncclDataType_t type_of(kernels::DType type) {
  // In the order of kernels::DType; ncclNumTypes, which NCCL refuses, for types it lacks.
  constexpr std::array kTypes{ncclFloat64, ncclFloat32,  ncclFloat16, ncclBfloat16, ncclInt8,
                              ncclUint8,   ncclNumTypes, ncclInt32,   ncclInt64};
  static_assert(kTypes.size() == kernels::kNumDTypes);
  return kTypes[static_cast<size_t>(type)];
}

struct Number {
  const char* name;
  int ncclConfig_t::* field;
};
// Fields of newer headers go behind those of the oldest one that we are built with (2.28), by NCCL_VERSION_CODE.
constexpr std::array kNumbers{
    Number{"blocking", &ncclConfig_t::blocking},
    Number{"cga_cluster_size", &ncclConfig_t::cgaClusterSize},
    Number{"min_ctas", &ncclConfig_t::minCTAs},
    Number{"max_ctas", &ncclConfig_t::maxCTAs},
    Number{"split_share", &ncclConfig_t::splitShare},
    Number{"traffic_class", &ncclConfig_t::trafficClass},
    Number{"collnet_enable", &ncclConfig_t::collnetEnable},
    Number{"cta_policy", &ncclConfig_t::CTAPolicy},
    Number{"nvls_ctas", &ncclConfig_t::nvlsCTAs},
};

// NCCL acts on the thread's current device.
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
  std::vector<std::string> known_numbers() const override {
    std::vector<std::string> names;
    for (const auto& number : kNumbers) names.emplace_back(number.name);
    return names;
  }
  int init_rank(gpu::Comm* comm, int size, const gpu::UniqueId& id, int rank,
                const gpu::CommSettings& settings) override {
    const c10::cuda::CUDAGuard guard(index_);
    ncclUniqueId given;
    std::memcpy(given.internal, id.bytes.data(), id.bytes.size());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    for (const auto& [name, field] : kNumbers) {
      if (const auto wanted = settings.numbers.find(name); wanted != settings.numbers.end()) {
        config.*field = wanted->second;
      }
    }
    if (!settings.net_name.empty()) config.netName = strdup(settings.net_name.c_str());  // owned by NCCL from here on
    return ncclCommInitRankConfig(reinterpret_cast<ncclComm_t*>(comm), size, given, rank, &config);
  }
  int async_error(gpu::Comm comm, int* error) override {
    auto found = ncclSuccess;
    const auto result = ncclCommGetAsyncError(comm_of(comm), &found);
    *error = found;
    return result;
  }
  // NCCL restores the previous device: on a new thread that is device 0, which must not get a context because of it.
  int finalize(gpu::Comm comm) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclCommFinalize(comm_of(comm));
  }
  int destroy(gpu::Comm comm) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclCommDestroy(comm_of(comm));
  }
  int abort(gpu::Comm comm) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclCommAbort(comm_of(comm));
  }

  int group_start() override { return ncclGroupStart(); }
  int group_end() override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclGroupEnd();
  }
  int make_pre_mul_sum(gpu::SumOp* op, double scale, kernels::DType type, gpu::Comm comm) override {
    const c10::cuda::CUDAGuard guard(index_);
    alignas(double) std::array<std::byte, sizeof(double)> scalar{};
    kernels::scale_cast(scalar.data(), type, &scale, kernels::DType::kF64, 1, 1.0);
    auto made = ncclSum;
    const auto result =
        ncclRedOpCreatePreMulSum(&made, scalar.data(), type_of(type), ncclScalarHostImmediate, comm_of(comm));
    *op = made;
    return result;
  }
  int destroy_op(gpu::SumOp op, gpu::Comm comm) override {
    return ncclRedOpDestroy(static_cast<ncclRedOp_t>(op), comm_of(comm));
  }

  int all_reduce(const void* input, void* output, int64_t numel, kernels::DType type, gpu::SumOp op, gpu::Comm comm,
                 gpu::Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclAllReduce(input, output, numel, type_of(type), static_cast<ncclRedOp_t>(op), comm_of(comm),
                         stream_of(stream));
  }
  int reduce(void* data, int64_t numel, kernels::DType type, int root, gpu::Comm comm, gpu::Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclReduce(data, data, numel, type_of(type), ncclSum, root, comm_of(comm), stream_of(stream));
  }
  int reduce_scatter(const void* input, void* output, int64_t output_numel, kernels::DType type, gpu::Comm comm,
                     gpu::Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclReduceScatter(input, output, output_numel, type_of(type), ncclSum, comm_of(comm), stream_of(stream));
  }
  int all_gather(const void* input, void* output, int64_t input_numel, kernels::DType type, gpu::Comm comm,
                 gpu::Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclAllGather(input, output, input_numel, type_of(type), comm_of(comm), stream_of(stream));
  }
  int broadcast(void* data, int64_t numel, kernels::DType type, int root, gpu::Comm comm, gpu::Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    return ncclBroadcast(data, data, numel, type_of(type), root, comm_of(comm), stream_of(stream));
  }

 private:
  c10::DeviceIndex index_;
};

}  // namespace

std::shared_ptr<gpu::Nccl> nccl_library(int index) { return std::make_shared<NcclLibrary>(index); }

}  // namespace torchddp::transport

#endif
