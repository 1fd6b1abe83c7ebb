#include "reducer/report/status.h"

#include <utility>

#include "timeline/timeline.h"

namespace torchddp::reducer {

void LiveStatus::begin_forward(int64_t step) {
  const std::lock_guard lock(mutex_);
  step_ = step;
  phase_.store(Phase::kForward, std::memory_order_relaxed);
}

void LiveStatus::end_step() {
  phase_.store(Phase::kIdle, std::memory_order_relaxed);
  if (has_note_.load(std::memory_order_relaxed)) {
    with_note({});
  }
}

int64_t LiveStatus::begin_wait(std::string what, int64_t bucket) {
  const std::lock_guard lock(mutex_);
  waits_.push_back({++wait_number_, std::move(what), bucket, timeline::now_ns()});
  return wait_number_;
}

void LiveStatus::end_wait(int64_t number) {
  const std::lock_guard lock(mutex_);
  std::erase_if(waits_, [&](const Wait& wait) { return wait.number == number; });
}

void LiveStatus::set_error(std::string text) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(text);
}

std::string LiveStatus::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void LiveStatus::note_failure(const std::string& text) {
  const std::lock_guard lock(mutex_);
  note_ += (note_.empty() ? "" : "\n") + text;
  has_note_.store(true, std::memory_order_relaxed);
}

void LiveStatus::set_peers(std::vector<PeerProcess> peers) {
  const std::lock_guard lock(mutex_);
  peers_ = std::move(peers);
}

std::string LiveStatus::with_note(std::string text) {
  constexpr std::chrono::milliseconds kPatience(300);
  std::unique_lock lock(mutex_);
  const auto peers = peers_;
  lock.unlock();
  if (const auto missing = missing_peers(peers, text, kPatience); !missing.empty()) {
    text += "\nOf the other ranks, " + missing + ".";
  }
  lock.lock();
  if (!note_.empty()) {
    text.append("\n").append(std::exchange(note_, {}));
  }
  has_note_.store(false, std::memory_order_relaxed);
  return text;
}

Status LiveStatus::read() const {
  const std::lock_guard lock(mutex_);
  Status status;
  status.step = step_;
  status.phase = phase_.load(std::memory_order_relaxed);
  status.waits = !waits_.empty();
  if (status.waits) {
    const auto& wait = waits_.back();
    status.waits_for = wait.what;
    status.bucket = wait.bucket;
    status.waited_ns = timeline::now_ns() - wait.since_ns;
  }
  status.error = error_;
  return status;
}

}  // namespace torchddp::reducer
