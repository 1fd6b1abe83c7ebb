// Operations: what a rank asks for, and what follows from that and from the ranks that take part.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/round_up.h"
#include "kernels/sum.h"
#include "shm/board.h"

namespace torchddp::shm {

// As torch names it.
const char* kind_name(OpKind kind);

// What is infinite or NaN in an operation.
struct NonFinite {
  std::atomic<int64_t> inputs{0};        // elements of this rank's input, added
  std::atomic<bool> sums_finite{false};  // whether all elements of the result are known to be finite
};

struct Operation {
  OpKind kind = OpKind::kAllReduce;
  kernels::DType type = kernels::DType::kF32;
  kernels::ReduceOp op = kernels::ReduceOp::kSum;
  int root = 0;
  // Elements of this rank's input (kScatter: of the root's).
  int64_t numel = 0;
  // Must lie in this rank's segment unless is_eager(); null where a rank has none (not the root).
  const void* input = nullptr;
  // Any memory; of a large kAllReduce it is the input; of kReduce it may be, and is null but on the root.
  void* output = nullptr;
  // What this rank's input is multiplied by before it is summed (kAllReduce, kReduce); ranks may differ. Anything but 1 for a sum of
  // kF64 or kF32 only.
  double scale = 1.0;
  // For a large kAllReduce of kF32: memory of the segment for numel 16-bit floats of type `wire`, in which the input travels. Sums are
  // formed in kF32; sums that travel on to other hosts are rounded again.
  void* wire_memory = nullptr;
  kernels::DType wire = kernels::DType::kBF16;
  // Of kAllReduce on a single host, the same on all ranks. The output of a kEveryone is what the input is a copy of. A kQuestion has no input, and a bool, if anything, for its output: whether all accept.
  Form form = Form::kUsual;
  bool accepts = false;
  // Of a large kAllReduce, a sum of floats without wire_memory: filled in by the time that wait() returns. Whoever sums looks, while sums
  // are in registers. Nothing is found out about others.
  std::shared_ptr<NonFinite> non_finite = {};
  // kAllToAllSplits: bytes that this rank expects from each, in rank order; empty: nothing from anybody.
  std::vector<int64_t> expected = {};

  int64_t bytes() const { return numel * kernels::item_size(type); }
};

// A block of kAllToAllSplits is a table of size + 1 offsets (int64), padded to this many bytes, then the data: bytes
// [offsets[r], offsets[r + 1]) of it are for rank r.
constexpr int64_t split_table_bytes(int size) { return round_up((size + 1) * 8, 16); }

// How it is done. Whether the operation's input travels in the post.
bool is_eager(const Operation& operation, const Board& board);
// Whether it is summed from group to group, or in chunks by their owners; by each rank for itself otherwise.
bool is_chained(const Operation& operation, const Board& board);
bool is_chunked(const Operation& operation, const Board& board);
// Whether the numbers travel in 16 bits; how many bytes that are.
bool has_wire(const Operation& operation, const Board& board);
int64_t wire_bytes(const Operation& operation);
// Whether infinities and NaNs can be told.
bool can_count(const Operation& operation, const Board& board);

struct Moved {
  int64_t bytes = 0;        // of other ranks' memory, that this rank reads or writes
  int64_t outer_numel = 0;  // of its shard, which it sums with the other hosts
};
// What an operation like this takes of this rank, if every rank does its own work.
Moved moved(const Operation& operation, const Board& board);

// Of elements.
struct Range {
  int64_t begin, end;
  int64_t numel() const { return end - begin; }
};
std::string describe(const Operation& operation, uint64_t seq);
// What may differ besides kind and size.
std::string details(const Operation& operation, const Board& board);

}  // namespace torchddp::shm
