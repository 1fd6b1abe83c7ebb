#include "transport/c10d/c10d_transport.h"

#include <ATen/Functions.h>

#include "common/check.h"
#include "transport/c10d/flat_collectives.h"

namespace torchddp::transport {
namespace {

class C10dWork final : public Work {
 public:
  bool poll() override { return work_ == nullptr || work_->isCompleted(); }

  void wait(std::chrono::milliseconds timeout) override {
    if (work_ == nullptr) {
      return;
    }
    bool ok = false;
    try {
      // With a time limit, torch's NCCL would make the host wait instead of the stream.
      const bool queued = tensors.front().defined() && !tensors.front().device().is_cpu();
      ok = timeout == kTransportTimeout || queued ? work_->wait() : work_->wait(timeout);
    } catch (const std::exception& error) {
      throw TransportError(error.what());
    }
    // c10d lets a Work report failure by its return value alone, and torchft's does.
    if (!ok) {
      throw TransportError("the process group reported that the operation failed (Work.wait() returned False)");
    }
    work_.reset();
  }

  void abandon() override { work_.reset(); }

  template <typename Start>
  void start(const char* operation, Start&& launch) {
    TDDP_INTERNAL(work_ == nullptr, operation, " on a Work whose last operation was not waited for");
    try {
      work_ = launch();
    } catch (const std::exception& error) {
      throw TransportError(c10::str("could not start ", operation, ": ", error.what()));
    }
  }

  // Kept between operations: c10d takes its tensors by a vector.
  std::vector<at::Tensor> tensors{1};

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

C10dWork& own(Work& work) {
  auto* mine = dynamic_cast<C10dWork*>(&work);
  TDDP_INTERNAL(mine != nullptr, "a Work of another transport was given to the c10d transport");
  return *mine;
}

}  // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {
  TDDP_CHECK(group_ != nullptr, "the process group is None: call torch.distributed.init_process_group first");
}

at::Tensor C10dTransport::allocate(int64_t numel, at::ScalarType dtype, at::Device device) {
  return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
}

std::unique_ptr<Work> C10dTransport::make_work() { return std::make_unique<C10dWork>(); }

void C10dTransport::all_reduce(const at::Tensor& tensor, Work& work, const SumOptions& options) {
  TDDP_INTERNAL(options.scale == 1.0 && !options.wire, "a process group neither scales nor narrows");
  check_flat("all_reduce", tensor);
  auto& mine = own(work);
  mine.tensors[0] = tensor;
  mine.start("all_reduce", [&] { return group_->allreduce(mine.tensors, c10d::AllreduceOptions()); });
}

void C10dTransport::reduce(const at::Tensor& tensor, int root, Work& work, const SumOptions& options) {
  TDDP_INTERNAL(options.scale == 1.0 && !options.wire, "a process group neither scales nor narrows");
  check_rooted("reduce", tensor, root);
  auto& mine = own(work);
  mine.tensors[0] = tensor;
  c10d::ReduceOptions reduce_options;
  reduce_options.rootRank = root;
  mine.start("reduce", [&] { return group_->reduce(mine.tensors, reduce_options); });
}

void C10dTransport::reduce_scatter(const at::Tensor& output, const at::Tensor& input, Work& work) {
  check_reduce_scatter(output, input);
  auto out = output;
  auto in = input;
  own(work).start("reduce_scatter", [&] { return reduce_scatter_flat(*group_, out, in); });
}

void C10dTransport::all_gather(const at::Tensor& output, const at::Tensor& input, Work& work) {
  check_all_gather(output, input);
  auto out = output;
  auto in = input;
  own(work).start("all_gather", [&] { return all_gather_flat(*group_, out, in); });
}

void C10dTransport::broadcast(const at::Tensor& tensor, int root, Work& work) {
  check_rooted("broadcast", tensor, root);
  auto& mine = own(work);
  mine.tensors[0] = tensor;
  c10d::BroadcastOptions options;
  options.rootRank = root;
  mine.start("broadcast", [&] { return group_->broadcast(mine.tensors, options); });
}

void C10dTransport::barrier(Work& work) {
  own(work).start("barrier", [&] { return group_->barrier(c10d::BarrierOptions()); });
}

}  // namespace torchddp::transport
