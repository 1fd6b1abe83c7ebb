#include "shm/chunks.h"

#include <array>
#include <atomic>
#include <cstring>
#include <string>

namespace torchddp::shm {
namespace {

template <typename Ask>
auto ask_outer(Failure& failure, Ask&& ask) {
  try {
    return ask();
  } catch (const std::exception& error) {
    failure.fail(std::string("the all-reduce with the other hosts failed: ") + error.what(), -1);
  }
}

}  // namespace

void Chunks::begin() {
  grid_ = Grid(job_.operation, job_.board);
  next_done_ = 0;
  is_finished_ = false;
  // Relaxed: peers read the slot after the post, whose store is the one that others wait for.
  constexpr auto kRelaxed = std::memory_order_relaxed;
  auto& slot = job_.slot(job_.rank());
  slot.non_finite.store(0, kRelaxed);
  slot.sums_not_finite.store(0, kRelaxed);
  slot.claimed.store(Tally::pack(job_.seq, 0), kRelaxed);
  // Excludes this value: to a rank that still looks for the slot's last operation, it means that everything was written.
  slot.marks.store(Marks::none(job_.seq), std::memory_order_release);
}

bool Chunks::work() {
  if (!inputs_.find_all()) return false;
  do_own();
  if (const auto range = outer_shard(); range.numel() > 0) {
    auto* data = inputs_.block(job_.rank()) + range.begin * job_.item();
    ask_outer(job_.failure,
              [&] { job_.config.outer->start(data, job_.operation.type, range.numel(), job_.operation.outer_type); });
  }
  return true;
}

void Chunks::do_own() {
  const int mine = job_.rank();
  const auto own = grid_.share(mine);
  // Bounded, so that a peer that corrupts `claimed` can't keep us here.
  const auto run = [&] {
    for (auto left = own.size(); left > 0 && do_chunk(mine); --left) {
      // Long work continues while other ranks wake up and then share it.
      if (left == own.size() && left > 1) job_.board.ring();
    }
  };
  if (job_.config.is_parallel(grid_.range(own).numel() * job_.item())) {
    job_.config.run_parallel(job_.config.threads, run);
  } else {
    run();
  }
}

bool Chunks::help() {
  if (job_.board.spans() || !inputs_.find_all()) return false;
  const int size = job_.board.size();
  for (int step = 1; step <= size; ++step) {  // so that not all start at the same rank
    if (do_chunk((job_.rank() + step) % size)) return true;
  }
  return false;
}

// Does the next unclaimed chunk of a rank. False if there is none.
bool Chunks::do_chunk(int rank) {
  const auto own = grid_.share(rank);
  auto& slot = job_.slot(rank);
  auto tally = slot.claimed.load();
  do {
    if (Tally::seq(tally) != job_.seq || Tally::count(tally) >= static_cast<uint64_t>(own.size())) return false;
  } while (!slot.claimed.compare_exchange_weak(tally, tally + 1));
  const auto place = static_cast<int>(Tally::count(tally));
  sum(rank, grid_.range({own.begin + place, own.begin + place + 1}));
  const auto bit = Marks::bit(place);
  if (Marks::has_all(slot.marks.fetch_or(bit) | bit, own.size()) && job_.board.has_sleepers()) {
    // On one host there is nothing left to do before everything is done.
    if (job_.board.spans() || job_.board.all_of_ranks([&](int peer) { return is_done(peer); })) job_.board.ring();
  }
  return true;
}

// For the owner.
void Chunks::sum(int rank, Range range) const {
  std::array<void*, kMaxRanks> targets;
  size_t count = 0;
  const auto add = [&](int target) { targets[count++] = inputs_.block(target) + range.begin * job_.item(); };
  if (job_.board.spans()) {
    add(rank);
  } else {
    for (int target = 0; target < job_.board.size(); ++target) add(target);
  }
  inputs_.sum(range, {targets.data(), count});
}

// A rank that has posted has this operation in its slot, or a later one.
bool Chunks::is_done(int rank) const {
  if (!job_.has_posted(rank)) return false;
  const auto marks = job_.slot(rank).marks.load();
  return !Marks::is_of(marks, job_.seq) || Marks::has_all(marks, grid_.share(rank).size());
}

bool Chunks::is_complete() {
  const auto& board = job_.board;
  const auto is_over = [&](int rank) {
    return rank >= board.owners() || (board.spans() ? board.header(rank).outer.load() > job_.seq : is_done(rank));
  };
  return board.all_from(next_done_, is_over) && (is_finished_ || !board.spans());
}

bool Chunks::waits_for(int rank, bool is_worked) const {
  const auto& board = job_.board;
  if (!job_.has_posted(rank)) return true;
  if (!is_worked) return false;
  if (board.header(rank).done.load() <= job_.seq) return true;
  return board.spans() ? rank < board.owners() && board.header(rank).outer.load() <= job_.seq : !is_done(rank);
}

Range Chunks::outer_shard() const { return job_.board.spans() ? grid_.range(grid_.share(job_.rank())) : Range{0, 0}; }

bool Chunks::finish_outer() {
  if (const auto range = outer_shard(); range.numel() > 0) {
    if (!ask_outer(job_.failure, [&] { return job_.config.outer->finish_oldest(); })) return false;
    const auto* mine = inputs_.block(job_.rank());
    for (int rank = 0; rank < job_.board.size(); ++rank) {
      if (auto* block = inputs_.block(rank); block != mine) {
        const auto offset = range.begin * job_.item();
        std::memcpy(block + offset, mine + offset, range.numel() * job_.item());
      }
    }
  }
  is_finished_ = true;
  return true;
}

}  // namespace torchddp::shm
