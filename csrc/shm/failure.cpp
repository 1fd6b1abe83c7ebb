#include "shm/failure.h"

namespace torchddp::shm {

void Failure::check() {
  if (is_forked()) throw TransportError(kForkedAway);
  if (interrupted_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(reason_mutex_);
    throw TransportError(reason_);
  }
  if (!failed_.empty()) {
    throw TransportError(failed_ + " The shared-memory transport can't be used after that.");
  }
}

void Failure::interrupt(const std::string& reason) {
  if (is_forked()) return;
  {
    const std::lock_guard lock(reason_mutex_);
    if (interrupted_.load(std::memory_order_relaxed)) return;
    reason_ = reason;
    interrupted_.store(true, std::memory_order_release);
  }
  auto open = static_cast<uint32_t>(RankState::kOpen);
  board_.own_header().state.compare_exchange_strong(open, static_cast<uint32_t>(RankState::kFailed));
  board_.ring();
}

void Failure::fail(const std::string& message, int culprit) {
  failed_ = message.ends_with('.') ? message : message + '.';
  auto& mine = board_.own_header();
  mine.culprit.store(culprit);
  mine.state.store(static_cast<uint32_t>(RankState::kFailed));
  board_.ring();
  throw TransportError(message);
}

void Failure::fail_after(const std::string& what, int rank, bool late) {
  const auto culprit = board_.header(rank).culprit.load();
  const bool known = culprit >= 0 && culprit < board_.size() && culprit != board_.rank();
  if (!known && !late) {
    const auto now = Clock::now();
    if (silent_ < 0) {
      silent_ = rank;
      silent_since_ = now;
    }
    if (now < silent_since_ + reason_patience_) return;
  }
  const auto before = " before " + what + " was complete.";
  if (!known) fail(board_.name(rank) + " gave up" + before + " Its log says why.", rank);
  fail(board_.name(culprit) + " is missing: " + board_.name(rank) + " gave up waiting for it" + before +
           " Look at both logs.",
       culprit);
}

}  // namespace torchddp::shm
