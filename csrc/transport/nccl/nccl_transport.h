// NCCL called directly, on a stream of its own: for CUDA tensors of one device.
#pragma once

#include <memory>

#include "gpu/communicator.h"
#include "transport/transport.h"

namespace torchddp::transport {

// Note [The order of collectives on a device]
// NCCL matches the operations of a communicator by their order alone, and an operation's kernel holds its place on the device until
// those of all peers have come. So ranks must start the operations of all communicators of a device in the same order: were there no
// room for both, two ranks that start them in different orders would wait for each other for ever. Nothing in here orders ours against
// those of the process group (SyncBatchNorm, the program's own collectives): streams are independent. What does is the program, whose
// host thread makes all calls, and makes them in the same order on all ranks, as it must with two process groups of torch. Buckets are
// launched in plan order from autograd's thread of the device, which runs nodes in an order that follows from the graph.
// That order is only the host's. From 2.26 on NCCL_LAUNCH_ORDER_IMPLICIT=1 makes NCCL keep it on the device, across communicators;
// with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) the device does so itself. Without either, kernels of two communicators may
// start in another order than they were launched in, which matters only where there is no room for both.
// All models over one process group share one communicator (torchddp/transport/nccl.py), so theirs are ordered by its stream.

// Queues operations behind the current stream and lets the stream that is current at Work::wait() wait for them; the host never
// waits. What that means for memory: Note [Streams and lifetimes] in gpu/bucket_streams.h; for errors: Note [Errors of the device are
// found by a watchdog] in gpu/communicator.h. A time limit given to Work::wait() is not used: the host does not wait.
class NcclTransport final : public Transport {
 public:
  // `timeout`: of each operation. `device`: the communicator's.
  NcclTransport(std::shared_ptr<gpu::Communicator> communicator, at::Device device, std::chrono::milliseconds timeout);

  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  // Of NCCL where that can register it: Note [When windows are made] in gpu/window_memory.h. Otherwise torch's.
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, at::Device device) override;
  std::unique_ptr<Work> make_work() override;
  // The communicator is aborted, for all models that share it: what waits for the device comes back.
  void interrupt(const std::string& reason) override;
  void check() override { communicator_->check(); }

  // The same communicator, with plain memory.
  std::shared_ptr<Transport> fallback() const override { return plain_; }
  int64_t memory_state() override { return lost_memory_ ? 0 : communicator_->memory_state(); }
  void commit_memory() override { communicator_->commit_memory(timeout_); }
  at::Device message_device() const override { return device_; }

  const std::shared_ptr<gpu::Communicator>& communicator() const { return communicator_; }
  at::Device device() const { return device_; }

 private:
  enum class Memory : uint8_t { kWindows, kPlain };
  NcclTransport(std::shared_ptr<gpu::Communicator> communicator, at::Device device, std::chrono::milliseconds timeout,
                Memory memory);

  void launch(const Collective& operation, Work& work) override;

  std::shared_ptr<gpu::Communicator> communicator_;
  at::Device device_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<NcclTransport> plain_;  // null: this is plain
  bool lost_memory_ = false;
  at::Tensor nothing_;  // what a barrier reduces
};

}  // namespace torchddp::transport
