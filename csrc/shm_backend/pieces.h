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

// Whether each rank should sum for itself; and whether in pieces, if possible. The same on all ranks.
bool sum_for_themselves(const shm::Operation& whole, const shm::Board& board);
bool may_go_in_pieces(const shm::Operation& whole);
// Of the buffers for it.
int64_t piece_buffer_bytes(const shm::Operation& whole);
// `whole`: without an input; its output holds this rank's addends. `finish`, which may be empty, is called for each part of the
// sum, in order, while it is in cache. Complete on return. `buffers`: from the transport's scratch memory; if this throws, a peer
// may still use them.
using FinishPiece = std::function<void(std::byte* part, int64_t numel)>;
void sum_in_pieces(ShmTransport& transport, const shm::Operation& whole, const at::Tensor& buffers,
                   std::chrono::milliseconds timeout, const FinishPiece& finish);

}  // namespace torchddp::shm_backend
