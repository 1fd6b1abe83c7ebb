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

  std::string name() const override { return "nccl"; }
  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  // Collective for CUDA memory where NCCL has windows.
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, at::Device device) override;
  std::unique_ptr<Work> make_work() override;
  bool reaches_any_memory() const override { return true; }
  bool reaches(const at::Tensor& tensor) const override { return tensor.device() == device_; }
  bool scales(at::ScalarType) const override { return false; }

  void all_reduce(const at::Tensor& tensor, Work& work, const SumOptions& options) override;
  using Transport::all_reduce;
  using Transport::reduce;
  void reduce(const at::Tensor& tensor, int root, Work& work, const SumOptions& options) override;
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, Work& work) override;
  void all_gather(const at::Tensor& output, const at::Tensor& input, Work& work) override;
  void broadcast(const at::Tensor& tensor, int root, Work& work) override;
  void barrier(Work& work) override;
  // The communicator is aborted: what waits for the device comes back.
  void interrupt(const std::string& reason) override;
  void check() override { communicator_->check(); }

 private:
  template <typename Call>
  void start(Work& work, gpu::OperationLabel label, const at::Tensor& written, const at::Tensor& read, Call&& call);
  void check_device(const char* operation, const at::Tensor& tensor) const;

  std::shared_ptr<gpu::Communicator> communicator_;
  at::Device device_;
  at::Tensor nothing_;  // what a barrier reduces
};

}  // namespace torchddp::transport
