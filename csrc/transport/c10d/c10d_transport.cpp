#include "transport/c10d/c10d_transport.h"

#include <ATen/Functions.h>

#include "common/check.h"
#include "kernels/sum.h"
#include "transport/c10d/flat_collectives.h"
#include "transport/c10d/group_work.h"
#include "transport/sum_types.h"

namespace torchddp::transport {
namespace {

class C10dWork final : public Work {
 public:
  // Other backends than gloo may have works that complete only when they are waited for (torchft's), or end when they are aborted.
  C10dWork(GroupPtr group, const Interruption& interruption, bool is_gloo)
      : group_(std::move(group)), interruption_(interruption), is_gloo_(is_gloo) {}

  bool poll() override { return work_ == nullptr || work_->isCompleted(); }

  void wait(std::chrono::milliseconds timeout) override {
    if (work_ == nullptr) {
      return;
    }
    bool ok = false;
    try {
      // With a time limit, torch's NCCL would make the host wait instead of the stream.
      const auto limit = timeout == kTransportTimeout || is_queued_ ? kNoTimeout : timeout;
      ok = is_gloo_ && !is_queued_ ? wait_interruptibly(*work_, group_, interruption_, limit) : work_->wait(limit);
    } catch (const SignalInterrupt&) {
      throw;
    } catch (const std::exception& error) {
      interruption_.check();  // which may have been why
      throw TransportError(error.what());
    }
    // c10d lets a Work report failure by its return value alone, and torchft's does.
    if (!ok) {
      throw TransportError("the process group reported that the operation failed (Work.wait() returned False)");
    }
    work_.reset();
    if (const auto finish = std::exchange(finish_, nullptr)) {
      finish();
    }
  }

  void abandon() override {
    work_.reset();
    finish_ = nullptr;
  }

  // What is left to do with the result, by the thread that waits for it.
  void then(std::function<void()> finish) { finish_ = std::move(finish); }

  // `device`: of the operation's tensors.
  template <typename Start>
  void start(const char* operation, at::Device device, Start&& launch) {
    TDDP_INTERNAL(work_ == nullptr, operation, " on a Work whose last operation was not waited for");
    interruption_.check();
    is_queued_ = !device.is_cpu();
    try {
      work_ = launch();
    } catch (const std::exception& error) {
      throw TransportError(c10::str("could not start ", operation, ": ", error.what()));
    }
  }

  // Kept between operations: c10d takes its tensors by a vector.
  std::vector<at::Tensor> tensors{1};

 private:
  const GroupPtr group_;
  const Interruption interruption_;
  const bool is_gloo_;
  bool is_queued_ = false;  // on a stream of the device
  c10::intrusive_ptr<c10d::Work> work_;
  std::function<void()> finish_;
};

C10dWork& own(Work& work) {
  auto* mine = dynamic_cast<C10dWork*>(&work);
  TDDP_INTERNAL(mine != nullptr, "a Work of another transport was given to the c10d transport");
  return *mine;
}

}  // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {
  TDDP_CHECK(group_ != nullptr, "the process group is None: call torch.distributed.init_process_group first");
  is_gloo_ = is_gloo(*group_);
}

void C10dTransport::interrupt(const std::string& reason) {
  Transport::interrupt(reason);
  try {
    group_->abort();
  } catch (const std::exception&) {
    // The backend can't: its operations end by their own time limit.
  }
}

// Note [Sums to one rank over gloo]
// gloo's reduce-scatter with an all-gather took 1.4 times as long as its all-reduce (68 MB, 1 Gbit/s). What a rank needs to sum is
// sent to it directly instead, (W - 1) / W of the bytes once, and it sums in rank order, in the thread that waits. Costs memory for the inputs meanwhile.
bool C10dTransport::sums_itself(const at::Tensor& tensor) const {
  return is_gloo_ && size() > 1 && tensor.device().is_cpu() && tensor.numel() > 0 && sum_type(tensor.scalar_type());
}

void C10dTransport::exchange_and_sum(const char* operation, const at::Tensor& output, const at::Tensor& input,
                                     std::vector<int64_t> out_splits, std::vector<int64_t> in_splits, Work& work) {
  const auto numel = out_splits.front();
  auto received = at::empty({numel * size()}, input.options());
  auto sent = input;
  auto& mine = own(work);
  mine.start(operation, input.device(),
             [&] { return all_to_all_flat(*group_, received, sent, out_splits, in_splits); });
  if (numel == 0) {
    return;
  }
  mine.then([output, received, numel, ranks = size()] {
    std::vector<const void*> sources;
    const auto* data = static_cast<const std::byte*>(received.const_data_ptr());
    for (int rank = 0; rank < ranks; ++rank) {
      sources.push_back(data + rank * numel * static_cast<int64_t>(received.itemsize()));
    }
    void* const target = output.mutable_data_ptr();
    kernels::reduce_ranks({&target, 1}, sources, *sum_type(received.scalar_type()), kernels::ReduceOp::kSum, numel);
  });
}

at::Tensor C10dTransport::allocate(int64_t numel, at::ScalarType dtype, at::Device device) {
  return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
}

std::unique_ptr<Work> C10dTransport::make_work() {
  return std::make_unique<C10dWork>(group_, interruption(), is_gloo_);
}

void C10dTransport::all_reduce(const at::Tensor& tensor, Work& work, const SumOptions& options) {
  TDDP_INTERNAL(options.scale == 1.0 && !options.wire, "a process group neither scales nor narrows");
  check_flat("all_reduce", tensor);
  auto& mine = own(work);
  mine.tensors[0] = tensor;
  mine.start("all_reduce", tensor.device(), [&] { return group_->allreduce(mine.tensors, c10d::AllreduceOptions()); });
  const auto bytes = bytes_of(tensor);
  count(Route::kC10d, bytes, tensor.is_sparse() ? (size() - 1) * bytes : all_reduce_bytes(bytes, size()));
}

void C10dTransport::reduce(const at::Tensor& tensor, int root, Work& work, const SumOptions& options) {
  TDDP_INTERNAL(options.scale == 1.0 && !options.wire, "a process group neither scales nor narrows");
  check_rooted("reduce", tensor, root);
  start_reduce(tensor, root, work);
  const auto bytes = bytes_of(tensor);
  count(Route::kC10d, bytes, reduce_bytes(bytes, rank() == root));
}

void C10dTransport::start_reduce(const at::Tensor& tensor, int root, Work& work) {
  if (sums_itself(tensor)) {
    std::vector<int64_t> in_splits(static_cast<size_t>(size()), 0);
    in_splits[static_cast<size_t>(root)] = tensor.numel();
    exchange_and_sum("reduce", tensor, tensor,
                     std::vector<int64_t>(static_cast<size_t>(size()), rank() == root ? tensor.numel() : 0),
                     std::move(in_splits), work);
    return;
  }
  auto& mine = own(work);
  mine.tensors[0] = tensor;
  c10d::ReduceOptions reduce_options;
  reduce_options.rootRank = root;
  mine.start("reduce", tensor.device(), [&] { return group_->reduce(mine.tensors, reduce_options); });
}

void C10dTransport::reduce_scatter(const at::Tensor& output, const at::Tensor& input, Work& work) {
  check_reduce_scatter(output, input);
  start_reduce_scatter(output, input, work);
  const auto bytes = bytes_of(input);
  count(Route::kC10d, bytes, one_way_bytes(bytes, size()));
}

void C10dTransport::start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, Work& work) {
  if (sums_itself(output)) {
    const std::vector<int64_t> splits(static_cast<size_t>(size()), output.numel());
    exchange_and_sum("reduce_scatter", output, input, splits, splits, work);
    return;
  }
  auto out = output;
  auto in = input;
  own(work).start("reduce_scatter", in.device(), [&] { return reduce_scatter_flat(*group_, out, in); });
}

void C10dTransport::all_gather(const at::Tensor& output, const at::Tensor& input, Work& work) {
  check_all_gather(output, input);
  auto out = output;
  auto in = input;
  own(work).start("all_gather", in.device(), [&] { return all_gather_flat(*group_, out, in); });
  const auto bytes = bytes_of(output);
  count(Route::kC10d, bytes, one_way_bytes(bytes, size()));
}

void C10dTransport::broadcast(const at::Tensor& tensor, int root, Work& work) {
  check_rooted("broadcast", tensor, root);
  auto& mine = own(work);
  mine.tensors[0] = tensor;
  c10d::BroadcastOptions options;
  options.rootRank = root;
  mine.start("broadcast", tensor.device(), [&] { return group_->broadcast(mine.tensors, options); });
  const auto bytes = bytes_of(tensor);
  count(Route::kC10d, bytes, one_way_bytes(bytes, size()));
}

void C10dTransport::barrier(Work& work) {
  own(work).start("barrier", at::kCPU, [&] { return group_->barrier(c10d::BarrierOptions()); });
}

}  // namespace torchddp::transport
