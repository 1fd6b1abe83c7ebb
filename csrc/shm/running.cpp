#include "shm/running.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "kernels/pack.h"

namespace torchddp::shm {
namespace {

int64_t wire_bytes(const Operation& operation) { return operation.numel * kernels::item_size(operation.wire); }

bool agrees(const Post& post, const Operation& mine) {
  return post.kind == mine.kind && post.type == static_cast<uint32_t>(mine.type) &&
         post.op == static_cast<uint32_t>(mine.op) && post.root == mine.root &&
         (post.numel == mine.numel || mine.kind == OpKind::kAllToAllSplits);
}

[[noreturn]] void fail_out_of_step(const Running& op, int rank, const Post& post, Failure& failure) {
  using kernels::DType;
  using kernels::ReduceOp;
  const auto& board = op.board;
  const Operation theirs{
      .kind = post.kind,
      .type = static_cast<DType>(std::min(post.type, static_cast<uint32_t>(DType::kI64))),
      .op = static_cast<ReduceOp>(std::min(post.op, static_cast<uint32_t>(ReduceOp::kMax))),
      .root = post.root,
      .numel = std::clamp<int64_t>(post.numel, 0, INT64_MAX / 8),  // of any type: bytes() can't overflow
  };
  failure.fail("the ranks are out of step: " + board.name(board.rank()) + " is in " + op.describe() +
                   details(op.operation, board) + ", " + board.name(rank) + " in " + describe(theirs, op.seq) +
                   details(theirs, board) +
                   ". All must call the same collectives in the same order with the same shapes, dtypes, roots and "
                   "reductions",
               rank);
}

[[noreturn]] void fail_outside(const Running& op, int rank, Failure& failure) {
  failure.fail(op.board.name(rank) + " offers memory that is not in its segment, for " + op.describe(), rank);
}

// The part of a rank's block that is for this one.
std::byte* find_split(const Running& op, int rank, const Post& post, Failure& failure) {
  const auto& board = op.board;
  const auto table_bytes = split_table_bytes(board.size());
  const bool eager = post.offset == 0;
  const bool inside = eager ? post.numel <= kEagerBytes : board.holds(rank, post.offset, post.numel);
  if (post.numel < table_bytes || !inside) {
    fail_outside(op, rank, failure);
  }
  auto* block = eager ? board.eager_data(rank, op.seq) : board.base(rank) + post.offset;
  std::array<int64_t, 2> part{};
  std::memcpy(part.data(), block + static_cast<int64_t>(board.rank()) * 8, sizeof(part));
  const auto [begin, end] = part;
  if (begin < 0 || end < begin || end > post.numel - table_bytes) {
    fail_outside(op, rank, failure);
  }
  const auto& expected = op.operation.expected;
  const auto want = expected.empty() ? 0 : expected[static_cast<size_t>(rank)];
  if (end - begin != want) {
    failure.fail("the ranks disagree on the sizes in " + op.describe() + ": " + board.name(rank) + " has " +
                     std::to_string(end - begin) + " bytes for " + board.name(board.rank()) + ", which expects " +
                     std::to_string(want),
                 rank);
  }
  return block + table_bytes + begin;
}

}  // namespace

Running::Running(const Board& board)
    : board(board),
      blocks(static_cast<size_t>(board.size())),
      wires(blocks.size()),
      scales(blocks.size()),
      counted(blocks.size()) {}

void Running::start(const Operation& started, uint64_t number) {
  operation = started;
  eager = is_eager(operation, board);
  const int mine = board.rank();
  Post post{.kind = operation.kind,
            .type = static_cast<uint32_t>(operation.type),
            .op = static_cast<uint32_t>(operation.op),
            .root = operation.root,
            .numel = operation.numel,
            .offset = 0,
            .scale = operation.scale,
            .counted = operation.non_finite != nullptr};
  if (operation.input != nullptr && eager) {
    std::memcpy(board.eager_data(mine, number), operation.input, static_cast<size_t>(operation.bytes()));
  } else if (operation.input != nullptr) {
    post.offset = static_cast<const std::byte*>(operation.input) - board.base(mine);
    if (!board.holds(mine, post.offset, operation.bytes())) {
      throw InternalError(std::string(kind_name(operation.kind)) + " of memory that is not in the shared segment");
    }
  }
  if (has_wire()) {
    post.wire = 1 + static_cast<uint32_t>(operation.wire);
    post.wire_offset = static_cast<const std::byte*>(operation.wire_memory) - board.base(mine);
    if (operation.type != kernels::DType::kF32 || !board.holds(mine, post.wire_offset, wire_bytes(operation))) {
      throw InternalError("only fp32 travels in 16 bits, and through the shared segment");
    }
    kernels::scale_cast(operation.wire_memory, operation.wire, operation.input, kernels::DType::kF32, operation.numel,
                        operation.scale);
  }
  auto& slot = board.slot(mine, number);
  slot.post = post;
  if (is_push()) {
    // Relaxed: peers read the slot after `posted`, whose store is the one that others have to wait for.
    constexpr auto kRelaxed = std::memory_order_relaxed;
    slot.non_finite.store(0, kRelaxed);
    slot.sums_not_finite.store(0, kRelaxed);
    slot.claimed.store(Tally::pack(number, 0), kRelaxed);
    // Not this one: to a rank that still looks for the slot's last operation it says that all was written.
    slot.completed.store(Tally::pack(number, 0), std::memory_order_release);
  }
  // Last: an operation that was refused leaves the slot as free as it was.
  seq = number;
  is_worked = is_finished = false;
  next_input = next_shard = next_done = 0;
}

bool Running::has_inputs() {
  for (; next_input < board.size(); ++next_input) {
    if (needs(next_input) && board.header(next_input).posted.load() <= seq) {
      return false;
    }
  }
  return true;
}

void Running::find_inputs(Failure& failure) {
  scaled = counts = false;
  for (int rank = 0; rank < board.size(); ++rank) {
    if (!needs(rank)) {
      continue;
    }
    const auto at = static_cast<size_t>(rank);
    const Post post = board.slot(rank, seq).post;
    // Not to be read again by a compiler that would rather: the peer may have changed it.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (!agrees(post, operation)) {
      fail_out_of_step(*this, rank, post, failure);
    }
    if (operation.kind == OpKind::kAllToAllSplits) {
      blocks[at] = find_split(*this, rank, post, failure);
      continue;
    }
    scales[at] = post.scale;
    scaled |= post.scale != 1.0;
    counted[at] = post.counted != 0 && can_count();
    counts |= counted[at] != 0;
    if (eager) {
      blocks[at] = board.eager_data(rank, seq);
      continue;
    }
    if (!board.holds(rank, post.offset, operation.bytes())) {
      fail_outside(*this, rank, failure);
    }
    blocks[at] = board.base(rank) + post.offset;
    if (has_wire()) {
      if (post.wire != 1 + static_cast<uint32_t>(operation.wire) ||
          !board.holds(rank, post.wire_offset, wire_bytes(operation))) {
        failure.fail(board.name(rank) + " does not send " + describe() + " as 16-bit floats from its segment", rank);
      }
      wires[at] = board.base(rank) + post.wire_offset;
    }
  }
}

bool Running::can_count() const {
  return is_push() && !has_wire() && operation.op == kernels::ReduceOp::kSum && kernels::is_float(operation.type);
}

bool Running::needs(int rank) const {
  if (operation.kind == OpKind::kBroadcast || operation.kind == OpKind::kScatter) {
    return rank == operation.root;
  }
  return reads(board.rank());
}

// A slot that serves a later operation says so too.
bool Running::is_summed(int owner) const {
  const auto tally = board.slot(owner, seq).completed.load();
  return Tally::seq(tally) != seq || Tally::count(tally) == chunks(owner);
}

bool Running::is_complete() {
  if (!is_worked || eager) {
    return is_worked;
  }
  const bool offers = needs(board.rank()) || operation.kind == OpKind::kReduce;
  const int last = is_outer() ? board.owners() : is_push() || offers ? board.size() : 0;
  for (; next_shard < last; ++next_shard) {
    const auto& peer = board.header(next_shard);
    const bool is_done = is_outer()  ? peer.outer.load() > seq
                         : is_push() ? is_summed(next_shard)
                                     : !reads(next_shard) || peer.done.load() > seq;
    if (!is_done) {
      return false;
    }
  }
  return is_finished || !is_outer();
}

bool Running::is_recyclable() {
  if (!is_complete() || (board.spans() && !is_finished)) {
    return false;
  }
  for (; next_done < board.size(); ++next_done) {
    if (board.header(next_done).done.load() <= seq) {
      return false;
    }
  }
  return true;
}

bool Running::waits_for(int rank) const {
  const auto& peer = board.header(rank);
  if (!is_worked) {
    return needs(rank) && peer.posted.load() <= seq;
  }
  if (peer.done.load() <= seq) {
    return reads(rank);
  }
  if (is_outer()) {
    return rank < board.owners() && peer.outer.load() <= seq;
  }
  return is_push() && !is_summed(rank);
}

}  // namespace torchddp::shm
