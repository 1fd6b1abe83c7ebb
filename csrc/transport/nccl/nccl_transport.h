// Calls NCCL directly, on its own stream, for CUDA tensors of one device.
#pragma once

#include <memory>

#include "gpu/communicator.h"
#include "transport/transport.h"

namespace torchddp::transport {

// Note [The order of collectives on a device]
// NCCL matches a communicator's operations by order alone, and an operation's kernel occupies the device until those of all
// peers have arrived. So ranks must start the operations of all communicators of a device in the same order: if there is no
// room for both, two ranks that start them in different orders wait for each other forever. Nothing here orders our operations
// against those of the process group (SyncBatchNorm, the program's own collectives), since streams are independent. The program
// does: its host thread makes all calls, and in the same order on all ranks, as it must with two process groups of torch.
// Buckets are launched in plan order from autograd's thread for the device, which runs nodes in an order that follows from the
// graph. That is only the host's order. Since 2.26, NCCL_LAUNCH_ORDER_IMPLICIT=1 makes NCCL keep it on the device across
// communicators; with a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) the device does so by itself. Without either,
// kernels of two communicators may start in another order than they were launched, which only matters if there is no room for
// both. All models over one process group share one communicator (torchddp/transport/nccl.py), so its stream orders their
// operations.

// Queues operations after the current stream's work and makes the stream that is current at Work::wait() wait for them; the
// host never waits. For the consequences for memory see Note [Streams and lifetimes] in gpu/bucket_streams.h; for errors, Note
// [Errors of the device are found by a watchdog] in gpu/communicator.h. The time limit passed to Work::wait() is unused, since
// the host does not wait.
class NcclTransport final : public Transport {
 public:
  // `timeout`: for each operation. `device`: the communicator's. `sums_in_place`: see Capabilities; equal on all ranks, see
  // torchddp/transport/nccl_choice.py.
  NcclTransport(std::shared_ptr<gpu::Communicator> communicator, at::Device device, std::chrono::milliseconds timeout,
                bool sums_in_place);

  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  std::unique_ptr<Work> make_work() override;
  // Aborts the communicator for all models that share it, so that anything waiting for the device returns.
  void interrupt(const std::string& reason) override {
    Transport::interrupt(reason);
    communicator_->interrupt(reason);
  }
  void check() override { communicator_->check(); }

  const std::shared_ptr<gpu::Communicator>& communicator() const { return communicator_; }
  at::Device device() const { return device_; }

 private:
  void launch(const Collective& operation, Work& work) override;

  std::shared_ptr<gpu::Communicator> communicator_;
  at::Device device_;
  std::chrono::milliseconds timeout_;
  at::Tensor nothing_;  // what a barrier reduces
};

}  // namespace torchddp::transport
