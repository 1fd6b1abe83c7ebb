// The work of an operation: what a rank reads, sums and writes once the inputs are there.
#include <algorithm>
#include <array>
#include <cstring>

#include "common/errors.h"
#include "shm/engine.h"

namespace torchddp::shm {
namespace {

// Of each rank's block: small enough to be in cache when it is written to all, large enough to be worth a claim.
constexpr int64_t kChunkBytes = 64 * 1024;
// Shards begin at multiples of this many elements: whole cache lines for every type.
constexpr int64_t kShardUnit = 128;
// Below this one thread is faster.
constexpr int64_t kParallelBytes = 4 << 20;

}  // namespace

Engine::Range Engine::shard(const Operation& operation, int owner) const {
  const auto numel = operation.numel;
  const auto each = round_up(ceil_div(numel, config_.owners), kShardUnit);
  return {std::min(numel, owner * each), std::min(numel, (owner + 1) * each)};
}

uint64_t Engine::chunks(const Running& op, int owner) const {
  const auto range = shard(op.operation, owner);
  const auto chunk = kChunkBytes / kernels::item_size(op.operation.type);
  return static_cast<uint64_t>(ceil_div(range.end - range.begin, chunk));
}

bool Engine::needs(const Running& op, int rank) const {
  const auto kind = op.operation.kind;
  if (kind == OpKind::kBroadcast || kind == OpKind::kScatter) {
    return rank == op.operation.root;
  }
  return reads(op, config_.rank);
}

bool Engine::reads(const Running& op, int rank) const {
  return op.operation.kind != OpKind::kReduce || rank == op.operation.root;
}

bool Engine::inputs_here(const Running& op) {
  for (int rank = 0; rank < size(); ++rank) {
    auto& posted = posted_[static_cast<size_t>(rank)];
    if (needs(op, rank) && posted <= op.seq && (posted = header(rank).posted.load()) <= op.seq) {
      return false;
    }
  }
  return true;
}

// Whether `rank` is one of those that an operation still waits for.
bool Engine::blocks(const Running& op, int rank) const {
  const auto& peer = header(rank);
  if (op.seq >= cursor_) {
    return needs(op, rank) && peer.posted.load() <= op.seq;
  }
  if (peer.done.load() <= op.seq) {
    return reads(op, rank);
  }
  if (is_outer(op)) {
    return rank < config_.owners && peer.outer.load() <= op.seq;
  }
  if (is_push(op)) {
    const auto tally = slot(rank, op.seq).completed.load();
    return Tally::seq(tally) == op.seq && Tally::count(tally) != chunks(op, rank);
  }
  return false;
}

bool Engine::advance() {
  bool moved = false;
  while (cursor_ < next_ && inputs_here(running(cursor_))) {
    auto& op = running(cursor_);
    find_blocks(op);
    if (is_push(op)) {
      reduce_own_shard(op);
    } else {
      pull(op);
    }
    ++cursor_;
    header(config_.rank).done.store(cursor_);
    ring();
    moved = true;
  }
  return moved;
}

// Addresses of all inputs, from what the peers wrote: checked before use, see Note [Trust].
void Engine::find_blocks(Running& op) {
  const auto& mine = op.operation;
  op.scaled = op.counts = false;
  for (int rank = 0; rank < size(); ++rank) {
    if (!needs(op, rank)) {
      continue;
    }
    const auto& segment = config_.segments[static_cast<size_t>(rank)];
    const Post post = slot(rank, op.seq).post;
    // Not to be read again by a compiler that would rather: the peer may have changed it.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (!agrees(post, mine)) {
      fail_out_of_step(op, rank, post);
    }
    if (mine.kind == OpKind::kAllToAllSplits) {
      find_splits(op, rank, post);
      continue;
    }
    op.scales[static_cast<size_t>(rank)] = post.scale;
    op.scaled |= post.scale != 1.0;
    op.counted[static_cast<size_t>(rank)] = post.counted != 0 && can_count(op);
    op.counts |= op.counted[static_cast<size_t>(rank)] != 0;
    if (op.eager) {
      op.blocks[static_cast<size_t>(rank)] = eager_data(rank, op.seq);
      continue;
    }
    if (post.offset < kDataOffset || mine.bytes() > segment.bytes || post.offset > segment.bytes - mine.bytes()) {
      fail(name(rank) + " offers memory that is not in its segment, for " + describe(op), rank);
    }
    op.blocks[static_cast<size_t>(rank)] = segment.base + post.offset;
    if (has_wire(op)) {
      const auto wire_bytes = mine.numel * kernels::item_size(mine.wire);
      if (post.wire != 1 + static_cast<uint32_t>(mine.wire) || post.wire_offset < kDataOffset ||
          post.wire_offset > segment.bytes - wire_bytes) {
        fail(name(rank) + " does not send " + describe(op) + " as 16-bit floats from its segment", rank);
      }
      op.wires[static_cast<size_t>(rank)] = segment.base + post.wire_offset;
    }
  }
}

bool Engine::agrees(const Post& post, const Operation& mine) const {
  return post.kind == mine.kind && post.type == static_cast<uint32_t>(mine.type) &&
         post.op == static_cast<uint32_t>(mine.op) && post.root == mine.root &&
         (post.numel == mine.numel || mine.kind == OpKind::kAllToAllSplits);
}

void Engine::fail_out_of_step(const Running& op, int rank, const Post& post) {
  Running theirs;
  theirs.operation = op.operation;
  theirs.operation.kind = post.kind;
  theirs.operation.root = post.root;
  theirs.operation.op =
      static_cast<kernels::ReduceOp>(std::min(post.op, static_cast<uint32_t>(kernels::ReduceOp::kMax)));
  theirs.operation.numel = std::clamp<int64_t>(post.numel, 0, INT64_MAX / 8);  // of any type: bytes() can't overflow
  theirs.operation.type = static_cast<kernels::DType>(std::min(post.type, static_cast<uint32_t>(kernels::DType::kI64)));
  theirs.seq = op.seq;
  fail("the ranks are out of step: " + name(config_.rank) + " is in " + describe(op) + details(op.operation) + ", " +
           name(rank) + " in " + describe(theirs) + details(theirs.operation) +
           ". All must call the same collectives in the same order with the same shapes, dtypes, roots and reductions",
       rank);
}

// The part of a rank's block that is for this one.
void Engine::find_splits(Running& op, int rank, const Post& post) {
  const auto& segment = config_.segments[static_cast<size_t>(rank)];
  const auto table_bytes = split_table_bytes(size());
  const bool eager = post.offset == 0;
  const auto room = eager ? kEagerBytes : segment.bytes;
  if (post.numel < table_bytes || post.numel > room ||
      (!eager && (post.offset < kDataOffset || post.offset > room - post.numel))) {
    fail(name(rank) + " offers memory that is not in its segment, for " + describe(op), rank);
  }
  auto* block = eager ? eager_data(rank, op.seq) : segment.base + post.offset;
  std::array<int64_t, 2> part{};
  std::memcpy(part.data(), block + static_cast<int64_t>(config_.rank) * 8, sizeof(part));
  const auto [begin, end] = part;
  if (begin < 0 || end < begin || end > post.numel - table_bytes) {
    fail(name(rank) + " offers memory that is not in its segment, for " + describe(op), rank);
  }
  const auto& expected = op.operation.expected;
  const auto want = expected.empty() ? 0 : expected[static_cast<size_t>(rank)];
  if (end - begin != want) {
    fail("the ranks disagree on the sizes in " + describe(op) + ": " + name(rank) + " has " +
             std::to_string(end - begin) + " bytes for " + name(config_.rank) + ", which expects " +
             std::to_string(want),
         rank);
  }
  op.blocks[static_cast<size_t>(rank)] = block + table_bytes + begin;
}

void Engine::pull(Running& op) {
  const auto& operation = op.operation;
  auto* output = static_cast<std::byte*>(operation.output);
  const auto bytes = operation.bytes();
  const auto piece = bytes / size();
  const auto copy = [&](int64_t to, int rank, int64_t from, int64_t count) {
    if (count > 0) {
      std::memcpy(output + to, op.blocks[static_cast<size_t>(rank)] + from, static_cast<size_t>(count));
    }
  };
  const auto sum_into_output = [&](int64_t from, int64_t numel) {
    std::array<const void*, kMaxRanks> sources;
    for (size_t rank = 0; rank < op.blocks.size(); ++rank) {
      sources[rank] = op.blocks[rank] + from;
    }
    void* const target = output;
    sum_ranks(op, {&target, 1}, {sources.data(), op.blocks.size()}, numel);
  };
  switch (operation.kind) {
    case OpKind::kAllReduce:
      sum_into_output(0, operation.numel);
      return;
    case OpKind::kReduceScatter:
      sum_into_output(config_.rank * piece, operation.numel / size());
      return;
    case OpKind::kAllGather:
      for (int rank = 0; rank < size(); ++rank) {
        copy(rank * bytes, rank, 0, bytes);
      }
      return;
    case OpKind::kReduce:
      reduce_to_root(op);
      return;
    case OpKind::kBroadcast:
      if (config_.rank != operation.root) {
        copy(0, operation.root, 0, bytes);
      }
      return;
    case OpKind::kScatter:
      copy(0, operation.root, config_.rank * piece, piece);
      return;
    case OpKind::kAllToAll:
      for (int rank = 0; rank < size(); ++rank) {
        copy(rank * piece, rank, config_.rank * piece, piece);
      }
      return;
    case OpKind::kAllToAllSplits:
      if (!operation.expected.empty()) {
        int64_t to = 0;
        for (int rank = 0; rank < size(); ++rank) {
          const auto count = operation.expected[static_cast<size_t>(rank)];
          copy(to, rank, 0, count);
          to += count;
        }
      }
      return;
  }
}

void Engine::reduce_to_root(const Running& op) const {
  const auto& operation = op.operation;
  if (config_.rank != operation.root) {
    return;
  }
  const auto item = kernels::item_size(operation.type);
  const auto sum = [&](int64_t begin, int64_t end) {
    std::array<const void*, kMaxRanks> sources;
    for (size_t rank = 0; rank < op.blocks.size(); ++rank) {
      sources[rank] = op.blocks[rank] + begin * item;
    }
    void* const target = static_cast<std::byte*>(operation.output) + begin * item;
    sum_ranks(op, {&target, 1}, {sources.data(), op.blocks.size()}, end - begin);
  };
  if (config_.threads == 1 || operation.bytes() < kParallelBytes) {
    sum(0, operation.numel);
    return;
  }
  const auto chunk = kChunkBytes / item;
  std::atomic<int64_t> next{0};
  config_.run_parallel(config_.threads, [&] {
    for (auto begin = next.fetch_add(chunk); begin < operation.numel; begin = next.fetch_add(chunk)) {
      sum(begin, std::min(operation.numel, begin + chunk));
    }
  });
}

void Engine::reduce_own_shard(Running& op) {
  if (config_.rank >= config_.owners) {
    return;
  }
  // Counted, so that a peer that spoils `claimed` can't keep us here.
  const auto reduce = [&] {
    for (auto left = chunks(op, config_.rank); left > 0 && reduce_chunk(op, config_.rank); --left) {
    }
  };
  const auto range = shard(op.operation, config_.rank);
  const auto item = kernels::item_size(op.operation.type);
  if (config_.threads > 1 && (range.end - range.begin) * item >= kParallelBytes) {
    config_.run_parallel(config_.threads, reduce);
  } else {
    reduce();
  }
  if (is_outer(op) && range.end > range.begin) {
    auto* data = op.blocks[static_cast<size_t>(config_.rank)] + range.begin * item;
    const auto wire = has_wire(op) ? std::optional(op.operation.wire) : std::nullopt;
    try {
      config_.outer->start(data, op.operation.type, range.end - range.begin, wire);
    } catch (const std::exception& error) {
      fail_outer(error);
    }
  }
}

// Sums one chunk of a shard that nobody has claimed yet. False if there is none.
bool Engine::reduce_chunk(Running& op, int owner) {
  auto& slot = this->slot(owner, op.seq);
  const auto total = chunks(op, owner);
  auto tally = slot.claimed.load();
  do {
    if (Tally::seq(tally) != op.seq || Tally::count(tally) >= total) {
      return false;
    }
  } while (!slot.claimed.compare_exchange_weak(tally, tally + 1));
  const auto range = shard(op.operation, owner);
  const auto chunk = kChunkBytes / kernels::item_size(op.operation.type);
  const auto begin = range.begin + static_cast<int64_t>(Tally::count(tally)) * chunk;
  sum_range(op, {begin, std::min(range.end, begin + chunk)}, !is_outer(op));
  const auto completed = slot.completed.fetch_add(1) + 1;
  if (Tally::count(completed) == total) {
    ring();
  }
  return true;
}

// A chunk of a shard whose owner has not got to it: it may be waiting for a processor. Not between hosts, where the owner alone
// writes its shard.
bool Engine::steal(Running& op) {
  if (op.seq >= cursor_ || !is_push(op) || is_outer(op)) {
    return false;
  }
  for (int i = 1; i < size(); ++i) {
    if (reduce_chunk(op, (config_.rank + i) % size())) {
      return true;
    }
  }
  return false;
}

bool Engine::advance_outer() {
  if (config_.outer == nullptr) {
    return false;
  }
  bool moved = false;
  while (outer_cursor_ < cursor_) {
    auto& op = running(outer_cursor_);
    if (is_outer(op) && config_.rank < config_.owners) {
      const auto range = shard(op.operation, config_.rank);
      if (range.end > range.begin) {
        try {
          if (!config_.outer->finish_oldest()) {
            break;
          }
        } catch (const std::exception& error) {
          fail_outer(error);
        }
        push_shard(op, range);
      }
    }
    ++outer_cursor_;
    header(config_.rank).outer.store(outer_cursor_);
    ring();
    moved = true;
  }
  return moved;
}

void Engine::fail_outer(const std::exception& error) {
  fail(std::string("the all-reduce with the other hosts failed: ") + error.what(), -1);
}

void Engine::push_shard(const Running& op, Range range) {
  const auto item = kernels::item_size(op.operation.type);
  const auto* source = op.blocks[static_cast<size_t>(config_.rank)] + range.begin * item;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != config_.rank) {
      std::memcpy(op.blocks[static_cast<size_t>(rank)] + range.begin * item, source,
                  static_cast<size_t>((range.end - range.begin) * item));
    }
  }
}

bool Engine::complete(Running& op) {
  if (op.seq >= cursor_) {
    return false;
  }
  if (op.eager) {
    return true;
  }
  if (is_outer(op)) {
    for (; op.next_shard < config_.owners; ++op.next_shard) {
      if (header(op.next_shard).outer.load() <= op.seq) {
        return false;
      }
    }
    return outer_cursor_ > op.seq;
  }
  if (is_push(op)) {
    for (; op.next_shard < size(); ++op.next_shard) {
      const auto tally = slot(op.next_shard, op.seq).completed.load();
      if (Tally::seq(tally) == op.seq && Tally::count(tally) != chunks(op, op.next_shard)) {
        return false;
      }
    }
    return true;
  }
  const bool offers = needs(op, config_.rank) || op.operation.kind == OpKind::kReduce;
  for (; offers && op.next_shard < size(); ++op.next_shard) {
    if (reads(op, op.next_shard) && header(op.next_shard).done.load() <= op.seq) {
      return false;
    }
  }
  return true;
}

// Nobody looks at the slot any more.
bool Engine::recyclable(uint64_t seq) {
  if (!complete(running(seq)) || (config_.outer != nullptr && outer_cursor_ <= seq)) {
    return false;
  }
  for (int rank = 0; rank < size(); ++rank) {
    auto& done = done_[static_cast<size_t>(rank)];
    if (done <= seq && (done = header(rank).done.load()) <= seq) {
      return false;
    }
  }
  return true;
}

}  // namespace torchddp::shm
