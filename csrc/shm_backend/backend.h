// Shared memory as a backend of torch.distributed.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <vector>

#include "shm_backend/gloo.h"
#include "shm_backend/work.h"

namespace torchddp::shm_backend {

class ShmCall;

// CPU tensors of any dtype, contiguous or not. Shared memory serves all-reduce, reduce, reduce-scatter, all-gather, broadcast
// and barrier of dense ones, and of reductions sum, average, minimum and maximum of the dtypes in sum_types.h, of bool, and
// (sum and average) of complex numbers; everything else goes to a gloo backend of the same ranks. Thread-safe, but all ranks
// must start collectives in the same order. Method names are those of torch 2.11; later versions' new names lead here.
class ShmBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;

  ShmBackend(std::shared_ptr<ShmTransport> transport, Gloo::BackendPtr gloo, std::chrono::milliseconds timeout);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return kName; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(kName, operations_->timeout());
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    operations_->set_timeout(timeout);
    gloo_.set_timeout(timeout);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return started_; }
  // Flat memory that collectives reach without another copy.
  bool supportsTensorAlloc(c10::DeviceIndex /*index*/) override { return true; }
  at::Tensor allocateTensor(long numel, at::TensorOptions options = {}) override;
  void shutdown() override { operations_->close(); }
  void abort() override {
    const auto reason = c10::str("rank ", rank_, " aborted the process group");
    operations_->abort(reason);
    gloo_.interrupt(reason);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  static constexpr const char* kName = "torchddp_shm";

 private:
  template <typename CallOptions>
  ShmCall begin(c10d::OpType type, const char* title, const CallOptions& options, Tensors inputs, Tensors outputs);
  WorkPtr start(ShmCall& call);
  ShmCall begin_message(c10d::OpType type, const char* title, const Tensors& tensors, int peer);
  WorkPtr reduce_all(ShmCall& call, const Tensors& tensors, const c10d::ReduceOp& op, bool keep = true, int root = 0);
  WorkPtr reduce_parts(ShmCall& call, const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op);

  std::shared_ptr<ShmOperations> operations_;
  Gloo gloo_;
  std::atomic<uint64_t> started_{0};
};

}  // namespace torchddp::shm_backend
