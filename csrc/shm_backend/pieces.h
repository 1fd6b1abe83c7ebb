// An all-reduce of private memory in which each rank sums for itself.
//
// Note [An all-reduce in pieces]
// The engine sums data in the segment, but a tensor is usually elsewhere. Copying it there, letting the owners of chunks sum
// it, and copying the sums back takes four passes over memory. A few ranks with a processor each do better by summing all
// blocks themselves, directly into their tensors. And if a tensor is larger than a cache, and its rank waits for the result
// anyway, it goes through a few buffers in pieces, each of which is summed while it is in cache.
//
// A rank takes the buffer that was freed last, and a new one only if its peers are behind: ranks in step need two, and if one
// rank loses its processor for a while the others can continue.
//
// Either all ranks cut their tensors or none: a rank that does not wait, or whose tensor is already in the segment, has no use
// for it. So a large all-reduce begins with a question (Form::kQuestion).
#pragma once

#include <chrono>
#include <functional>

#include "shm/operation.h"
#include "transport/shm/operation_memory.h"
#include "transport/shm/shm_transport.h"

namespace torchddp::shm_backend {

using namespace transport;

struct Pieces {
  shm::Operation whole;  // without memory
  std::byte* memory;
  std::chrono::milliseconds timeout;
  // Called for each part of the sum, in order, while it is in cache; may be empty.
  std::function<void(std::byte* part, int64_t numel)> finish;

  // Whether each rank should sum for itself; and whether in pieces, if possible. The same on all ranks.
  static bool sum_for_themselves(const shm::Operation& whole, const shm::Board& board);
  static bool are_used(const shm::Operation& whole);
  // Of the buffers.
  int64_t bytes() const;
  // Complete on return. `buffers`: from the transport's scratch memory; if this throws, a peer may still use them.
  void run(ShmTransport& transport, const at::Tensor& buffers) const;
};

}  // namespace torchddp::shm_backend
