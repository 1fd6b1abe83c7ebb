// The work of an operation: what a rank reads, sums and writes once the inputs are there.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "kernels/pack.h"
#include "shm/running.h"

namespace torchddp::shm {
namespace {

// Of each rank's block: small enough to be in cache when it is written to all, large enough to be worth a claim.
constexpr int64_t kChunkBytes = 64 * 1024;
// Below this one thread is faster.
constexpr int64_t kParallelBytes = 4 << 20;

bool is_parallel(const EngineConfig& config, int64_t bytes) { return config.threads > 1 && bytes >= kParallelBytes; }

// Whoever sums tells the others what it found, in their own slots: nobody else empties those.
void sum_checked(const Running& op, std::span<void* const> targets, std::span<const void* const> sources,
                 int64_t numel) {
  std::array<int64_t, kMaxRanks> counts;
  const std::span<int64_t> found(counts.data(), sources.size());
  std::fill(found.begin(), found.end(), 0);
  const auto scales = op.scaled ? std::span<const double>(op.scales) : std::span<const double>();
  if (!kernels::checked_sum_ranks(targets, sources, scales, op.operation.type, numel, found)) [[likely]] {
    return;
  }
  for (size_t rank = 0; rank < sources.size(); ++rank) {
    auto& theirs = op.board.slot(static_cast<int>(rank), op.seq);
    theirs.sums_not_finite.store(1);
    if (op.counted[rank] != 0) {
      theirs.non_finite.fetch_add(static_cast<uint64_t>(found[rank]));
    }
  }
}

// Sums of 16-bit floats, formed and written in kF32, piece by piece so that they stay in the first cache.
void sum_wires(const Running& op, Range range, std::span<void* const> targets) {
  constexpr int64_t kPiece = 2048;
  std::array<float, kPiece> total;
  std::array<float, kPiece> next;
  const auto wire = op.operation.wire;
  const auto wire_item = kernels::item_size(wire);
  for (auto begin = range.begin; begin < range.end; begin += kPiece) {
    const auto numel = std::min(kPiece, range.end - begin);
    for (size_t rank = 0; rank < op.wires.size(); ++rank) {
      const auto* source = op.wires[rank] + begin * wire_item;
      kernels::scale_cast(rank == 0 ? total.data() : next.data(), kernels::DType::kF32, source, wire, numel, 1.0);
      if (rank > 0) {
        void* const sum = total.data();
        const std::array<const void*, 2> sources{total.data(), next.data()};
        kernels::reduce_ranks({&sum, 1}, sources, kernels::DType::kF32, kernels::ReduceOp::kSum, numel);
      }
    }
    for (auto* target : targets) {
      std::memcpy(static_cast<std::byte*>(target) + (begin - range.begin) * static_cast<int64_t>(sizeof(float)),
                  total.data(), static_cast<size_t>(numel) * sizeof(float));
    }
  }
}

// A range of all blocks: scaled, narrow, checked, or as they are. `targets`: where its first element goes.
void sum_range(const Running& op, Range range, std::span<void* const> targets) {
  if (op.has_wire()) {
    sum_wires(op, range, targets);
    return;
  }
  const auto type = op.operation.type;
  const auto reduction = op.operation.op;
  const auto offset = range.begin * kernels::item_size(type);
  std::array<const void*, kMaxRanks> blocks;
  std::transform(op.blocks.begin(), op.blocks.end(), blocks.begin(), [&](auto* block) { return block + offset; });
  const std::span<const void* const> sources(blocks.data(), op.blocks.size());
  if (op.counts) {
    sum_checked(op, targets, sources, range.numel());
  } else if (op.scaled && reduction == kernels::ReduceOp::kSum && kernels::can_scale(type)) {
    kernels::scaled_sum_ranks(targets, sources, op.scales, type, range.numel());
  } else {
    kernels::reduce_ranks(targets, sources, type, reduction, range.numel());
  }
}

// Sums one chunk of a shard that nobody has claimed yet. False if there is none.
bool sum_chunk(const Running& op, int owner) {
  const auto& board = op.board;
  auto& slot = board.slot(owner, op.seq);
  const auto total = op.chunks(owner);
  auto tally = slot.claimed.load();
  do {
    if (Tally::seq(tally) != op.seq || Tally::count(tally) >= total) {
      return false;
    }
  } while (!slot.claimed.compare_exchange_weak(tally, tally + 1));
  const auto range = shard(op.operation, board, owner);
  const auto item = kernels::item_size(op.operation.type);
  const auto chunk = kChunkBytes / item;
  const auto begin = range.begin + static_cast<int64_t>(Tally::count(tally)) * chunk;
  std::array<void*, kMaxRanks> all;
  std::transform(op.blocks.begin(), op.blocks.end(), all.begin(), [&](auto* block) { return block + begin * item; });
  const std::span<void* const> targets(all.data(), op.blocks.size());
  sum_range(op, {begin, std::min(range.end, begin + chunk)},
            op.is_outer() ? targets.subspan(static_cast<size_t>(board.rank()), 1) : targets);
  const auto completed = slot.completed.fetch_add(1) + 1;
  if (Tally::count(completed) == total) {
    board.ring();
  }
  return true;
}

void sum_own_shard(const Running& op, const EngineConfig& config) {
  // Counted, so that a peer that spoils `claimed` can't keep us here.
  const auto sum = [&] {
    for (auto left = op.chunks(config.rank); left > 0 && sum_chunk(op, config.rank); --left) {
    }
  };
  const auto numel = shard(op.operation, op.board, config.rank).numel();
  if (is_parallel(config, numel * kernels::item_size(op.operation.type))) {
    config.run_parallel(config.threads, sum);
  } else {
    sum();
  }
}

void sum_to_root(const Running& op, const EngineConfig& config) {
  const auto& operation = op.operation;
  const auto item = kernels::item_size(operation.type);
  const auto sum = [&](int64_t begin, int64_t end) {
    void* const target = static_cast<std::byte*>(operation.output) + begin * item;
    sum_range(op, {begin, end}, {&target, 1});
  };
  if (!is_parallel(config, operation.bytes())) {
    sum(0, operation.numel);
    return;
  }
  const auto chunk = kChunkBytes / item;
  std::atomic<int64_t> next{0};
  config.run_parallel(config.threads, [&] {
    for (auto begin = next.fetch_add(chunk); begin < operation.numel; begin = next.fetch_add(chunk)) {
      sum(begin, std::min(operation.numel, begin + chunk));
    }
  });
}

void pull(const Running& op, const EngineConfig& config) {
  const auto& operation = op.operation;
  void* const output = operation.output;
  const int mine = config.rank;
  const int size = op.board.size();
  const auto bytes = operation.bytes();
  const auto piece = bytes / size;
  const auto copy = [&](int64_t to, int rank, int64_t from, int64_t count) {
    if (count > 0) {
      std::memcpy(static_cast<std::byte*>(output) + to, op.blocks[static_cast<size_t>(rank)] + from,
                  static_cast<size_t>(count));
    }
  };
  switch (operation.kind) {
    case OpKind::kAllReduce:
      sum_range(op, {0, operation.numel}, {&output, 1});
      return;
    case OpKind::kReduceScatter: {
      const auto numel = operation.numel / size;
      sum_range(op, {mine * numel, (mine + 1) * numel}, {&output, 1});
      return;
    }
    case OpKind::kReduce:
      if (mine == operation.root) {
        sum_to_root(op, config);
      }
      return;
    case OpKind::kBroadcast:
      if (mine != operation.root) {
        copy(0, operation.root, 0, bytes);
      }
      return;
    case OpKind::kScatter:
      copy(0, operation.root, mine * piece, piece);
      return;
    case OpKind::kAllGather:
      for (int rank = 0; rank < size; ++rank) {
        copy(rank * bytes, rank, 0, bytes);
      }
      return;
    case OpKind::kAllToAll:
      for (int rank = 0; rank < size; ++rank) {
        copy(rank * piece, rank, mine * piece, piece);
      }
      return;
    case OpKind::kAllToAllSplits:
      int64_t to = 0;
      for (size_t rank = 0; rank < operation.expected.size(); ++rank) {
        copy(to, static_cast<int>(rank), 0, operation.expected[rank]);
        to += operation.expected[rank];
      }
      return;
  }
}

template <typename Ask>
auto ask_outer(Failure& failure, Ask&& ask) {
  try {
    return ask();
  } catch (const std::exception& error) {
    failure.fail(std::string("the all-reduce with the other hosts failed: ") + error.what(), -1);
  }
}

}  // namespace

uint64_t Running::chunks(int owner) const {
  const auto chunk = kChunkBytes / kernels::item_size(operation.type);
  return static_cast<uint64_t>(ceil_div(shard(operation, board, owner).numel(), chunk));
}

void Running::work(const EngineConfig& config, Failure& failure) {
  find_inputs(failure);
  if (is_push()) {
    sum_own_shard(*this, config);
  } else {
    pull(*this, config);
  }
  if (const auto range = outer_shard(); range.numel() > 0) {
    auto* data = blocks[static_cast<size_t>(config.rank)] + range.begin * kernels::item_size(operation.type);
    const auto wire = has_wire() ? std::optional(operation.wire) : std::nullopt;
    ask_outer(failure, [&] { config.outer->start(data, operation.type, range.numel(), wire); });
  }
  is_worked = true;
}

bool Running::finish_outer(const EngineConfig& config, Failure& failure) {
  if (const auto range = outer_shard(); range.numel() > 0) {
    if (!ask_outer(failure, [&] { return config.outer->finish_oldest(); })) {
      return false;
    }
    const auto item = kernels::item_size(operation.type);
    const auto* mine = blocks[static_cast<size_t>(config.rank)];
    for (auto* block : blocks) {
      if (block != mine) {
        std::memcpy(block + range.begin * item, mine + range.begin * item, static_cast<size_t>(range.numel() * item));
      }
    }
  }
  is_finished = true;
  return true;
}

bool Running::steal_chunk() const {
  for (int i = 1; i < board.size(); ++i) {
    if (sum_chunk(*this, (board.rank() + i) % board.size())) {
      return true;
    }
  }
  return false;
}

void Running::settle() {
  if (const auto found = std::exchange(operation.non_finite, nullptr)) {
    const auto& mine = board.slot(board.rank(), seq);
    found->inputs.fetch_add(static_cast<int64_t>(mine.non_finite.load()));
    found->sums_finite.store(can_count() && !is_outer() && mine.sums_not_finite.load() == 0);
  }
}

}  // namespace torchddp::shm
