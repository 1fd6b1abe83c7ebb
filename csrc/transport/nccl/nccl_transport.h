// NCCL called directly, on a stream of its own: for CUDA tensors of one device.
#pragma once

#include <memory>

#include "gpu/communicator.h"
#include "transport/transport.h"

namespace torchddp::transport {

// Queues operations behind the current stream and lets the stream that is current at Work::wait() wait for them; the host never
// waits. What that means for memory: Note [Streams and lifetimes] in gpu/stream_set.h; for errors: Note [Errors of the device are
// found by a watchdog] in gpu/communicator.h. A time limit given to Work::wait() is not used: the communicator has its own.
class NcclTransport final : public Transport {
 public:
  NcclTransport(std::shared_ptr<gpu::Communicator> communicator, at::Device device);

  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  // Collective for CUDA memory where NCCL has windows.
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, at::Device device) override;
  std::unique_ptr<Work> make_work() override;
  // The communicator is aborted: what waits for the device comes back.
  void interrupt(const std::string& reason) override;
  void check() override { communicator_->check(); }

 private:
  void launch(const Collective& operation, Work& work) override;

  std::shared_ptr<gpu::Communicator> communicator_;
  at::Device device_;
  at::Tensor nothing_;  // what a barrier reduces
};

}  // namespace torchddp::transport
