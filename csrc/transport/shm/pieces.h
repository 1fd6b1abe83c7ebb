// An all-reduce of private memory whose ranks each sum for themselves.
//
// Note [An all-reduce in pieces]
// The engine sums what lies in the segment; a tensor is elsewhere as a rule. To copy it there, let the owners of chunks sum it, and copy
// the sums back takes four passes over memory. A few ranks with a processor each do better to sum all blocks themselves, right into their
// tensors. And where a tensor is larger than a cache, and its rank waits for the result anyway, it goes through a few buffers in
// pieces, each of which is summed while it is in a cache.
//
// A rank takes the buffer that was free last, and another one only if its peers are behind: ranks in step need two, and where a rank is
// kept from its processor for a while the others can go on.
//
// All ranks must cut their tensors, or none: a rank that does not wait, or whose tensor is in the segment already, has no use for it. So
// a large all-reduce begins with a question (Form::kQuestion).
#pragma once

#include <chrono>
#include <functional>

#include "shm/operation.h"
#include "transport/shm/operation_memory.h"

namespace torchddp::transport {

class ShmTransport;

struct Pieces {
  shm::Operation whole;  // without memory
  std::byte* memory;
  std::chrono::milliseconds timeout;
  // Called for each part of the sum, in order, while it is in cache; may be empty.
  std::function<void(std::byte* part, int64_t numel)> finish;

  // Whether each rank had better sum for itself; and whether in pieces, if it can. The same on all ranks.
  static bool sum_for_themselves(const shm::Operation& whole, const shm::Board& board);
  static bool are_used(const shm::Operation& whole);
  // Of the buffers.
  int64_t bytes() const;
  // Complete on return. `buffers`: of the transport's scratch memory; a peer may still use them if it throws.
  void run(ShmTransport& transport, const at::Tensor& buffers) const;
};

}  // namespace torchddp::transport
