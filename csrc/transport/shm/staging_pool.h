// Shared memory for the inputs of operations, kept from one to the next: the kernel clears new pages, which costs more than the
// copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <vector>

namespace torchddp::transport {

class ShmTransport;

// Thread-safe.
class StagingPool {
 public:
  // A byte tensor of at least `bytes`. Throws TransportError if there is no room.
  at::Tensor take(ShmTransport& transport, int64_t bytes);
  // Only of an operation that every rank is done with.
  void give_back(at::Tensor memory);
  void clear();

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> free_;  // oldest first
};

}  // namespace torchddp::transport
