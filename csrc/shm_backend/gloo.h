// What goes through gloo, because shared memory has no way for it: messages between two ranks, collectives that bring each rank
// something of its own, and reductions that the kernels lack.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <vector>

#include "shm_backend/work.h"
#include "transport/interruption.h"

namespace torchddp::shm_backend {

// Thread-safe as gloo is: collectives must be started in the same order on all ranks. Tensors may have any strides, and any
// dtype but in reductions. Arguments are checked before.
class Gloo {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  explicit Gloo(BackendPtr backend) : backend_(std::move(backend)) {}

  void set_timeout(std::chrono::milliseconds timeout) { backend_->setTimeout(timeout); }
  void interrupt(const std::string& reason) { interruption_.raise(reason); }

  // `from`: the first element of the result that goes to the outputs.
  WorkPtr all_reduce(Description description, const Tensors& inputs, const c10d::ReduceOp& op, const Tensors& outputs,
                     int64_t from = 0);
  // On the root, the description's outputs are one from each rank.
  WorkPtr gather(Description description, const at::Tensor& input, int root);
  // On the root, the description's inputs are one for each rank.
  WorkPtr scatter(Description description, const at::Tensor& output, int root);
  // From and for each rank.
  WorkPtr all_to_all(Description description, const Tensors& outputs, const Tensors& inputs);

  WorkPtr send(Description description, const at::Tensor& tensor, int to, int tag);
  // `from`: -1 for any rank.
  WorkPtr receive(Description description, const at::Tensor& tensor, int from, int tag);

 private:
  template <typename Begin>
  WorkPtr start(Description description, OperationMemory memory, Begin&& begin);

  const BackendPtr backend_;
  const Interruption interruption_;
};

}  // namespace torchddp::shm_backend
