#include "shm/chunks.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <utility>

#include "common/round_up.h"

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

Chunks::Chunks(Job& job, Inputs& inputs) : job_(job), inputs_(inputs), next_input_(job.board.groups().nodes().size()) {}

void Chunks::begin() {
  nodes_ = nodes_of(job_.operation, job_.board);
  grid_ = grid_of(job_.operation, job_.board);
  for (size_t node = 0; node < nodes_.size(); ++node) {
    next_input_[node] = nodes_[node].first;
  }
  next_done_ = 0;
  is_finished_ = false;
  // Relaxed: peers read the slot after the post, whose store is the one that others wait for.
  constexpr auto kRelaxed = std::memory_order_relaxed;
  auto& slot = job_.slot(job_.rank());
  slot.non_finite.store(0, kRelaxed);
  slot.sums_not_finite.store(0, kRelaxed);
  for (auto* stage : {&slot.sums, &slot.copies}) {
    stage->claimed.store(Tally::pack(job_.seq, 0), kRelaxed);
    // Excludes this value: to a rank that still looks for the slot's last operation, it means that everything was written.
    stage->marks.store(Marks::none(job_.seq), std::memory_order_release);
  }
}

Chunks::Share Chunks::share(int rank) const {
  const auto& node = nodes_[node_of(rank)];
  const int owners = owners_of(node, job_.board);
  const int place = rank - node.first;
  return place < owners ? Share{grid_.begin(place, owners), grid_.begin(place + 1, owners)} : Share{0, 0};
}

int Chunks::owner(size_t node, int chunk) const {
  return nodes_[node].first + grid_.owner(chunk, owners_of(nodes_[node], job_.board));
}

Stage& Chunks::stage(int rank, Step step) const {
  auto& slot = job_.slot(rank);
  return step == Step::kSum ? slot.sums : slot.copies;
}

std::byte* Chunks::at(int rank, int chunk) const {
  return inputs_.block(rank) + grid_.range(chunk, chunk + 1).begin * job_.item();
}

bool Chunks::work() {
  const int mine = job_.rank();
  const auto node = node_of(mine);
  if (!inputs_.find(nodes_[node], next_input_[node]) || !do_own(Step::kSum) ||
      !(is_last(node) || do_own(Step::kCopy))) {
    return false;
  }
  if (const auto range = outer_shard(); range.numel() > 0) {
    auto* data = inputs_.block(mine) + range.begin * job_.item();
    ask_outer(job_.failure,
              [&] { job_.config.outer->start(data, job_.operation.type, range.numel(), job_.operation.outer_type); });
  }
  return true;
}

// False if something it needs is missing.
bool Chunks::do_own(Step step) {
  const int mine = job_.rank();
  const auto own = share(mine);
  // Bounded, so that a peer that corrupts `claimed` can't keep us here.
  const auto run = [&] {
    for (auto left = own.size(); left > 0 && do_chunk(mine, step); --left) {
      // Long work continues while other ranks wake up and then share it.
      if (left == own.size() && left > 1) {
        job_.board.ring();
      }
    }
  };
  if (nodes_.size() == 1 && job_.config.is_parallel(grid_.range(own.begin, own.end).numel() * job_.item())) {
    job_.config.run_parallel(job_.config.threads, run);
  } else {
    run();
  }
  const auto tally = stage(mine, step).claimed.load();
  return nodes_.size() == 1 || Tally::seq(tally) != job_.seq ||
         Tally::count(tally) >= static_cast<uint64_t>(own.size());
}

bool Chunks::help(bool /*is_late*/) {
  if (job_.board.spans()) {
    return false;
  }
  const auto mine = node_of(job_.rank());
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const auto node = (mine + i) % nodes_.size();
    const auto& ranks = nodes_[node];
    if (!inputs_.find(ranks, next_input_[node])) {
      continue;
    }
    const int first = i == 0 ? job_.rank() - ranks.first + 1 : 0;  // so that not all start at the same one
    for (int place = first; place < first + ranks.size; ++place) {
      const int rank = ranks.first + place % ranks.size;
      if (do_chunk(rank, Step::kSum) || (!is_last(node) && do_chunk(rank, Step::kCopy))) {
        return true;
      }
    }
  }
  return false;
}

// Does the next unclaimed chunk of a rank. False if there is none, or some input is missing.
bool Chunks::do_chunk(int rank, Step step) {
  const auto node = node_of(rank);
  const auto own = share(rank);
  auto& stage = this->stage(rank, step);
  auto tally = stage.claimed.load();
  int chunk = 0;
  do {
    const auto claimed = Tally::count(tally);
    if (Tally::seq(tally) != job_.seq || claimed >= static_cast<uint64_t>(own.size())) {
      return false;
    }
    chunk = own.begin + static_cast<int>(claimed);
    if (!is_ready(node, chunk, step)) {
      return false;
    }
  } while (!stage.claimed.compare_exchange_weak(tally, tally + 1));
  if (step == Step::kSum) {
    sum(node, rank, chunk);
  } else {
    copy(node, chunk);
  }
  const auto bit = Marks::bit(chunk - own.begin);
  if (Marks::has_all(stage.marks.fetch_or(bit) | bit, own.size()) && job_.board.has_sleepers()) {
    // On one node there is nothing left to do before everything is done.
    const auto done = [&](int peer) { return is_done(peer); };
    if (nodes_.size() > 1 || job_.board.spans() || job_.board.all_of_ranks(done)) {
      job_.board.ring();
    }
  }
  return true;
}

bool Chunks::is_ready(size_t node, int chunk, Step step) {
  if (step == Step::kSum && node == 0) {
    return true;
  }
  const int giver = owner(step == Step::kSum ? node - 1 : nodes_.size() - 1, chunk);
  if (!inputs_.find(giver) || !has_marked(giver, chunk, Step::kSum)) {
    return false;
  }
  job_.board.count_lines(giver, 1);
  return true;
}

// `rank` has posted, so its slot holds this operation or a later one.
bool Chunks::has_marked(int rank, int chunk, Step step) const {
  const auto marks = stage(rank, step).marks.load();
  return !Marks::is_of(marks, job_.seq) || Marks::has(marks, chunk - share(rank).begin);
}

bool Chunks::is_done(int rank) const {
  const auto own = share(rank).size();
  if (!job_.has_posted(rank)) {
    return false;
  }
  const auto marks = stage(rank, is_last(node_of(rank)) ? Step::kSum : Step::kCopy).marks.load();
  return !Marks::is_of(marks, job_.seq) || Marks::has_all(marks, own);
}

std::span<void* const> Chunks::blocks(size_t node, int chunk, std::span<void*> room) const {
  const auto& ranks = nodes_[node];
  for (int i = 0; i < ranks.size; ++i) {
    room[static_cast<size_t>(i)] = at(ranks.first + i, chunk);
  }
  return room.first(static_cast<size_t>(ranks.size));
}

// Counts this many transfers of the blocks of the node's ranks.
void Chunks::count(size_t node, int chunk, int64_t times) const {
  for (int rank = nodes_[node].first; rank < nodes_[node].end(); ++rank) {
    job_.board.count_bytes(rank, times * bytes_of(chunk));
  }
}

void Chunks::sum(size_t node, int rank, int chunk) const {
  std::array<void*, kMaxRanks> room;
  const bool to_all = is_last(node) && !job_.board.spans();
  room[0] = at(rank, chunk);
  const auto targets = to_all ? blocks(node, chunk, room) : std::span<void* const>(room.data(), 1);
  const auto* partial = node == 0 ? nullptr : at(owner(node - 1, chunk), chunk);
  count(node, chunk, to_all ? 2 : 1);
  if (node > 0) {
    job_.board.count_bytes(owner(node - 1, chunk), bytes_of(chunk));
  }
  inputs_.sum(nodes_[node], partial, grid_.range(chunk, chunk + 1), targets);
}

void Chunks::copy(size_t node, int chunk) const {
  std::array<void*, kMaxRanks> room;
  const auto* total = at(owner(nodes_.size() - 1, chunk), chunk);
  const auto bytes = bytes_of(chunk);
  count(node, chunk, 1);
  job_.board.count_bytes(owner(nodes_.size() - 1, chunk), bytes);
  for (auto* target : blocks(node, chunk, room)) {
    std::memcpy(target, total, static_cast<size_t>(bytes));
  }
}

bool Chunks::is_complete() {
  const auto& board = job_.board;
  const int last = board.spans() ? board.owners() : board.size();
  for (; next_done_ < last; ++next_done_) {
    const bool done = board.spans() ? board.header(next_done_).outer.load() > job_.seq : is_done(next_done_);
    if (!done) {
      return false;
    }
    board.count_lines(next_done_, 1);
  }
  return is_finished_ || !board.spans();
}

bool Chunks::waits_for(int rank, bool is_worked) const {
  const auto& board = job_.board;
  if (!job_.has_posted(rank)) {
    return true;
  }
  if (!is_worked) {
    return nodes_.size() > 1 && rank != job_.rank() && !is_done(rank);
  }
  if (board.header(rank).done.load() <= job_.seq) {
    return true;
  }
  return board.spans() ? rank < board.owners() && board.header(rank).outer.load() <= job_.seq : !is_done(rank);
}

Range Chunks::outer_shard() const {
  const auto own = share(job_.rank());
  return job_.board.spans() ? grid_.range(own.begin, own.end) : Range{0, 0};
}

bool Chunks::finish_outer() {
  if (const auto range = outer_shard(); range.numel() > 0) {
    if (!ask_outer(job_.failure, [&] { return job_.config.outer->finish_oldest(); })) {
      return false;
    }
    const auto* mine = inputs_.block(job_.rank());
    for (int rank = 0; rank < job_.board.size(); ++rank) {
      if (auto* block = inputs_.block(rank); block != mine) {
        const auto offset = range.begin * job_.item();
        std::memcpy(block + offset, mine + offset, static_cast<size_t>(range.numel() * job_.item()));
      }
    }
  }
  is_finished_ = true;
  return true;
}

}  // namespace torchddp::shm
