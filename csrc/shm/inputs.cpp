#include "shm/inputs.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

namespace torchddp::shm {
namespace {

bool agrees(const Terms& terms, const Operation& mine) {
  return terms.kind == mine.kind && terms.type == static_cast<uint8_t>(mine.type) &&
         terms.op == static_cast<uint8_t>(mine.op) && terms.root == static_cast<uint8_t>(mine.root) &&
         terms.form == mine.form && terms.numel == mine.numel;
}

[[noreturn]] void fail_out_of_step(const Job& job, int rank, const Terms& terms) {
  using kernels::DType;
  using kernels::ReduceOp;
  const auto& board = job.board;
  const Operation theirs{
      .kind = terms.kind,
      .type = static_cast<DType>(std::min(terms.type, static_cast<uint8_t>(DType::kI64))),
      .op = static_cast<ReduceOp>(std::min(terms.op, static_cast<uint8_t>(ReduceOp::kMax))),
      .root = terms.root,
      .numel = std::clamp<int64_t>(terms.numel, 0, INT64_MAX / 8),  // of any type: bytes() can't overflow
  };
  const bool broadcasts = theirs.kind == OpKind::kBroadcast || job.operation.kind == OpKind::kBroadcast;
  job.failure.fail(
      "the ranks are out of step: " + board.name(board.rank()) + " is in " + job.describe() +
          details(job.operation, board) + ", " + board.name(rank) + " in " + describe(theirs, job.seq) +
          details(theirs, board) +
          ". All must call the same collectives in the same order with the same shapes, dtypes, roots "
          "and reductions" +
          (broadcasts ? ". If the broadcast is of a model's buffers, run its forward on all ranks, or evaluate "
                        "model.module on one"
                      : ""),
      rank);
}

[[noreturn]] void fail_outside(const Job& job, int rank) {
  job.failure.fail(job.board.name(rank) + " offers memory that is not in its segment, for " + job.describe(), rank);
}

// Keeps the compiler from reading it again: the peer may have changed it.
void read_once() { std::atomic_signal_fence(std::memory_order_seq_cst); }

Location location_of(const Post& post) {
  Location location;
  std::memcpy(&location, post.data.data(), sizeof(location));
  read_once();
  return location;
}

}  // namespace

Inputs::Inputs(Job& job)
    : job_(job), known_(static_cast<size_t>(job.board.size())), blocks_(known_.size()), scales_(known_.size()),
      counted_(known_.size()) {}

void Inputs::begin() {
  std::ranges::fill(known_, 0);
  scaled_ = counts_ = false;
  all_accept_ = is_open_ = true;
  next_ = 0;
}

Terms Inputs::terms() const {
  const auto& operation = job_.operation;
  return {.kind = operation.kind,
          .type = static_cast<uint8_t>(operation.type),
          .op = static_cast<uint8_t>(operation.op),
          .root = static_cast<uint8_t>(operation.root),
          .form = operation.form,
          .accepts = static_cast<uint8_t>(operation.accepts),
          .counted = static_cast<uint8_t>(operation.non_finite != nullptr),
          .numel = operation.numel,
          .scale = operation.scale};
}

bool Inputs::find(int rank) {
  if (known_[rank] == 0) {
    if (!is_open_ || !job_.has_posted(rank)) return false;
    check(rank);
  }
  return true;
}

bool Inputs::find_all() {
  return job_.board.all_from(next_, [&](int rank) { return find(rank); });
}

void Inputs::check(int rank) {
  const auto& operation = job_.operation;
  const Terms terms = job_.slot(rank).post.terms;
  read_once();
  if (!agrees(terms, operation)) fail_out_of_step(job_, rank, terms);
  blocks_[rank] = find_block(rank);
  all_accept_ &= terms.accepts != 0;
  scales_[rank] = terms.scale;
  scaled_ |= terms.scale != 1.0;
  counted_[rank] = terms.counted != 0 && can_count(operation, job_.board);
  counts_ |= counted_[rank] != 0;
  known_[rank] = 1;
}

std::byte* Inputs::find_block(int rank) const {
  auto& post = job_.slot(rank).post;
  if (is_eager(job_.operation, job_.board)) return post.data.data();
  const auto offset = location_of(post).offset;
  if (!job_.board.holds(rank, offset, job_.operation.bytes())) fail_outside(job_, rank);
  // A rank reads its own input where it was just read for the copy: from cache.
  const bool own = job_.operation.form == Form::kEveryone && rank == job_.rank();
  return own ? static_cast<std::byte*>(job_.operation.output) : job_.board.base(rank) + offset;
}

void Inputs::sum(Range range, std::span<void* const> targets) const {
  const auto& operation = job_.operation;
  const auto offset = range.begin * job_.item();
  std::array<const void*, kMaxRanks> room;
  const std::span<const void*> sources(room.data(), blocks_.size());
  std::ranges::transform(blocks_, sources.begin(), [&](const std::byte* block) { return block + offset; });
  const bool scaled = scaled_ && operation.op == kernels::ReduceOp::kSum && kernels::can_scale(operation.type);
  std::array<int64_t, kMaxRanks> counts;
  const std::span<int64_t> found(counts.data(), counts_ ? sources.size() : 0);
  std::ranges::fill(found, 0);
  if (!kernels::reduce_ranks(targets, sources, operation.type, operation.op, range.numel(),
                             {scales_.data(), scaled ? scales_.size() : 0}, found)) [[likely]] {
    return;
  }
  // The rank that sums writes what it found to the others' slots, which only their owners clear.
  for (int rank = 0; rank < job_.board.size(); ++rank) {
    auto& slot = job_.slot(rank);
    slot.sums_not_finite.store(1);
    if (counted_[rank] != 0) slot.non_finite.fetch_add(static_cast<uint64_t>(found[rank]));
  }
}

}  // namespace torchddp::shm
