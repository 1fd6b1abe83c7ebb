#include "shm/running.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "common/round_up.h"

namespace torchddp::shm {

Running::Running(const EngineConfig& config, const Board& board, Failure& failure, Done& done)
    : job_{config, board, failure, done}, inputs_(job_), pull_(job_, inputs_), chunks_(job_, inputs_),
      algorithm_(&pull_) {}

void Running::start(const Operation& started, uint64_t number) {
  auto& post = job_.board.slot(job_.rank(), number).post;
  job_.operation = started;
  put_input(post);
  // A rejected operation leaves the slot free.
  job_.seq = number;
  is_worked_ = is_finished_ = false;
  next_done_ = 0;
  inputs_.begin();
  algorithm_ = is_chunked(started, job_.board) ? static_cast<Algorithm*>(&chunks_) : &pull_;
  algorithm_->begin();
  post.terms = inputs_.terms();
  post.number.store(number + 1);
  if (is_eager(started, job_.board)) expect_another(number + 1, started.bytes());
}

// An operation is often followed by a similar one. Its post goes into cache lines that the peers have read, and taking those
// back takes as long as reading them; so do it now, while this rank waits anyway.
void Running::expect_another(uint64_t number, int64_t bytes) const {
  constexpr int64_t kLine = 64;
  constexpr int64_t kMaxLines = 32;
  auto* line = reinterpret_cast<std::byte*>(&job_.board.slot(job_.rank(), number).post);
  for (auto left = std::min(ceil_div(int64_t{offsetof(Post, data)} + bytes, kLine), kMaxLines); left > 0;
       --left, line += kLine) {
    __builtin_prefetch(line, 1);
  }
}

void Running::put_input(Post& post) const {
  const auto& board = job_.board;
  const auto& operation = job_.operation;
  const auto* input = static_cast<const std::byte*>(operation.input);
  if (is_eager(operation, board)) {
    if (input != nullptr && operation.numel > 0) std::memcpy(post.data.data(), input, operation.bytes());
    return;
  }
  Location location{0};
  if (input != nullptr) {
    location.offset = input - board.base(board.rank());
    if (!board.holds(board.rank(), location.offset, operation.bytes())) {
      throw InternalError(std::string(kind_name(operation.kind)) + " of memory that is not in the shared segment");
    }
  }
  std::memcpy(post.data.data(), &location, sizeof(location));
}

bool Running::work() {
  is_worked_ = algorithm_->work();
  if (is_worked_) inputs_.close();
  return is_worked_;
}

bool Running::finish_outer() {
  is_finished_ = algorithm_ != &chunks_ || chunks_.finish_outer();
  return is_finished_;
}

bool Running::is_recyclable() {
  return is_complete() && (!job_.board.spans() || is_finished_) &&
         job_.board.all_from(next_done_, [&](int rank) { return job_.done.has(rank, job_.seq); });
}

bool Running::waits_for(int rank) {
  const bool lags = job_.board.header(rank).done.load() <= job_.seq;
  return algorithm_->waits_for(rank, is_worked_) || (lags && is_complete());  // in that case the slot is waited for
}

bool Running::is_shared_work() const {
  return !is_eager(job_.operation, job_.board) && !is_chunked(job_.operation, job_.board);
}

bool Running::is_awaited() const {
  const auto& operation = job_.operation;
  if (operation.kind == OpKind::kBroadcast) return operation.root == job_.rank();
  return job_.board.all_of_ranks([&](int rank) { return job_.has_posted(rank); });
}

void Running::settle() {
  if (const auto found = std::exchange(job_.operation.non_finite, nullptr)) {
    const auto& mine = job_.slot(job_.rank());
    const bool counted = can_count(job_.operation, job_.board);
    found->inputs.fetch_add(counted ? static_cast<int64_t>(mine.non_finite.load()) : 0);
    found->sums_finite.store(counted && !job_.board.spans() && mine.sums_not_finite.load() == 0);
  }
}

}  // namespace torchddp::shm
