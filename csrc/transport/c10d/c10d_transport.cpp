#include "transport/c10d/c10d_transport.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "common/check.h"
#include "kernels/sum.h"
#include "transport/c10d/group_work.h"
#include "transport/scaling.h"
#include "transport/sum_types.h"

namespace torchddp::transport {
namespace {

using Kind = Collective::Kind;

class C10dWork final : public Work {
 public:
  // Works of other backends than gloo may only complete when waited for (torchft's), or end when aborted.
  C10dWork(GroupPtr group, const Interruption& interruption, bool is_gloo)
      : group_(std::move(group)), interruption_(interruption), is_gloo_(is_gloo) {}

  bool poll() override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
  }

  void wait(std::chrono::milliseconds timeout) override {
    if (works_.empty()) return;
    // With a time limit, torch's NCCL would make the host wait instead of the stream.
    const auto limit = timeout == kTransportTimeout || is_queued_ ? kNoTimeout : timeout;
    for (const auto& work : std::vector(works_)) {  // a copy: a signal's handler may wait for them, too
      wait_or_throw(*work, group_, interruption_, is_gloo_ && !is_queued_, limit);
    }
    works_.clear();
    if (const auto finish = std::exchange(finish_, nullptr)) finish();
  }

  void abandon() override {
    works_.clear();
    finish_ = nullptr;
  }

  // What remains to be done with the result, by the waiting thread.
  void then(std::function<void()> finish) { finish_ = std::move(finish); }

  // `device`: that of the operation's tensors. launch(works) appends what it starts.
  template <typename Start>
  void start(const char* operation, at::Device device, Start&& launch) {
    TDDP_INTERNAL(works_.empty(), operation, " on a Work whose last operation was not waited for");
    interruption_.check();
    is_queued_ = !device.is_cpu();
    const WithoutPythonObjects without_python_objects;
    try {
      launch(works_);
    } catch (const std::exception& error) {
      throw TransportError(with_advice(c10::str("could not start ", operation, ": ", reason_of(error))));
    }
  }

 private:
  const GroupPtr group_;
  const Interruption interruption_;
  const bool is_gloo_;
  bool is_queued_ = false;  // on a stream of the device
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::function<void()> finish_;
};

}  // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : Transport(Route::kC10d, {.sums_in_place = true}), group_(std::move(group)) {
  TDDP_CHECK(group_ != nullptr, "the process group is None: call torch.distributed.init_process_group first");
  is_gloo_ = is_gloo(*group_);
}

// Note [Sums to one rank over gloo]
// gloo's reduce-scatter built on an all-gather took 1.4 times as long as its all-reduce (68 MB, 1 Gbit/s). Instead, each rank
// is sent what it needs to sum, (W - 1) / W of the bytes once, and the waiting thread sums in rank order. Costs memory for the
// inputs meanwhile.
bool C10dTransport::sums_itself(const Collective& operation) const {
  const auto& sum = operation.output;
  return (operation.kind == Kind::kReduce || operation.kind == Kind::kReduceScatter) && is_gloo_ && size() > 1 &&
         sum.device().is_cpu() && sum.numel() > 0 && sum_type(sum.scalar_type());
}

void C10dTransport::exchange_and_sum(const Collective& operation, Work& work) {
  auto numel = operation.output.numel();  // of what this rank sums
  std::vector<int64_t> in_splits(static_cast<size_t>(size()), numel);
  if (operation.kind == Kind::kReduce) {
    in_splits.assign(in_splits.size(), 0);
    in_splits[operation.root] = numel;
    numel = rank() == operation.root ? numel : 0;
  }
  std::vector<int64_t> out_splits(in_splits.size(), numel);
  auto sent = operation.input;
  auto received = at::empty({numel * size()}, sent.options());
  auto& mine = own<C10dWork>(work);
  mine.start(operation.name(), sent.device(),
             [&](auto& works) { works.push_back(all_to_all_flat(*group_, received, sent, out_splits, in_splits)); });
  if (numel == 0) return;
  mine.then([output = operation.output, received, numel, ranks = size()] {
    std::vector<const void*> sources;
    const auto* data = static_cast<const std::byte*>(received.const_data_ptr());
    for (int rank = 0; rank < ranks; ++rank) {
      sources.push_back(data + rank * numel * static_cast<int64_t>(received.itemsize()));
    }
    void* const target = output.mutable_data_ptr();
    kernels::reduce_ranks({&target, 1}, sources, *sum_type(received.scalar_type()), kernels::ReduceOp::kSum, numel);
  });
}

std::unique_ptr<Work> C10dTransport::make_work() {
  return std::make_unique<C10dWork>(group_, interruption(), is_gloo_);
}

void C10dTransport::launch(const Collective& operation, Work& work) {
  if (sums_itself(operation)) {
    exchange_and_sum(operation, work);
    return;
  }
  const bool has_tensors = operation.kind != Kind::kBarrier;
  auto output = operation.output;
  auto input = operation.input;
  std::vector<at::Tensor> in_place{output};
  if (!operation.in_place.tensors.empty()) {
    all_reduce_each(operation, work);
    return;
  }
  const auto launch = [&] {
    switch (operation.kind) {
      case Kind::kAllReduce: return group_->allreduce(in_place, c10d::AllreduceOptions());
      case Kind::kReduce: return group_->reduce(in_place, {.rootRank = operation.root});
      case Kind::kReduceScatter: return reduce_scatter_flat(*group_, output, input);
      case Kind::kAllGather: return all_gather_flat(*group_, output, input);
      case Kind::kBroadcast: return group_->broadcast(in_place, {.rootRank = operation.root});
      default: return group_->barrier(c10d::BarrierOptions());
    }
  };
  own<C10dWork>(work).start(operation.name(), has_tensors ? input.device() : at::kCPU,
                            [&](auto& works) { works.push_back(launch()); });
}

void C10dTransport::all_reduce_each(const Collective& operation, Work& work) {
  const c10::NoGradGuard no_grad;
  own<C10dWork>(work).start(operation.name(), operation.input.device(), [&](auto& works) {
    const auto sum = [&](const at::Tensor& tensor) {
      std::vector<at::Tensor> in_place{tensor};
      works.push_back(group_->allreduce(in_place, c10d::AllreduceOptions()));
    };
    if (operation.input.numel() > 0) sum(operation.input);
    for (const auto& tensor : operation.in_place.tensors) {
      if (operation.in_place.scale != 1.0) scale_by(tensor, operation.in_place.scale);
      sum(tensor);
    }
  });
}

}  // namespace torchddp::transport
