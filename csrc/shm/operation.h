// Operations: what a rank asks for, and what follows from that and from the participating ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "kernels/sum.h"
#include "shm/board.h"

namespace torchddp::shm {

// The name used by torch.
const char* kind_name(OpKind kind);

// Non-finite values in an operation.
struct NonFinite {
  Atomic<int64_t> inputs{0};        // elements of this rank's input, added
  Atomic<bool> sums_finite{false};  // whether all elements of the result are known to be finite
};

struct Operation {
  OpKind kind = OpKind::kAllReduce;
  kernels::DType type = kernels::DType::kF32;
  kernels::ReduceOp op = kernels::ReduceOp::kSum;
  int root = 0;
  // Elements of this rank's input.
  int64_t numel = 0;
  // Must be in this rank's segment unless is_eager(); null on ranks without one (not the root).
  const void* input = nullptr;
  // Any memory. For a large kAllReduce it is the input; for kReduce it may be, and is null except on the root.
  void* output = nullptr;
  // Factor for this rank's input before it is summed (kAllReduce, kReduce); ranks may differ. Other than 1 only for sums of
  // kF64 or kF32.
  double scale = 1.0;
  // For a large kAllReduce of kF32 over several hosts: the 16-bit float in which a host's sums are sent to the others.
  std::optional<kernels::DType> outer_type = {};
  // For kAllReduce on a single host; equal on all ranks. The output of a kEveryone is what the input is a copy of. A kQuestion
  // has no input, and at most a bool as its output: whether all accept.
  Form form = Form::kUsual;
  bool accepts = false;
  // For a large kAllReduce that sums floats; filled in by the time wait() returns. The rank that sums
  // checks the values while they are in registers. Other operations report nothing.
  std::shared_ptr<NonFinite> non_finite = {};

  int64_t bytes() const { return numel * kernels::item_size(type); }
};

// Whether the operation's input is sent in the post itself.
bool is_eager(const Operation& operation, const Board& board);
// Whether it is summed in chunks by their owners; otherwise each rank sums for itself.
bool is_chunked(const Operation& operation, const Board& board);
// Whether infinities and NaNs can be reported.
bool can_count(const Operation& operation, const Board& board);

// Of elements.
struct Range {
  int64_t begin, end;
  int64_t numel() const { return end - begin; }
};

// How a large all-reduce is cut into chunks, and who owns which: the same on all ranks.
struct Grid {
  Grid() = default;
  Grid(const Operation& operation, const Board& board);

  // Chunks [begin, end).
  struct Share {
    int begin = 0, end = 0;
    int size() const { return end - begin; }
  };
  // The first `owners` ranks have as many consecutive chunks each; the others, on several hosts, none.
  Share share(int rank) const;
  // Of elements.
  Range range(Share share) const;

  int64_t numel = 0;
  int64_t chunk_numel = 0;
  int each = 0;  // chunks of an owner; the last ones may be empty
  int owners = 0;
};

struct Moved {
  int64_t bytes = 0;        // of other ranks' memory, that this rank reads or writes
  int64_t outer_numel = 0;  // of its shard, which it sums with the other hosts
};
// What such an operation costs this rank if every rank does its own work.
Moved moved(const Operation& operation, const Board& board);

std::string describe(const Operation& operation, uint64_t seq);
// What may differ besides kind and size.
std::string details(const Operation& operation, const Board& board);

}  // namespace torchddp::shm
