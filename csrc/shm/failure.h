// Why an engine can't go on.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>

#include "common/errors.h"
#include "common/forks.h"
#include "shm/board.h"

namespace torchddp::shm {

// Of one thread at a time, but for interrupt(). Once an engine has failed it stays so, and its peers see that.
class Failure {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Failure(const Board& board) : board_(board), forks_(forks()) {}

  // A forked child must not act for the rank.
  bool is_forked() const { return forks() != forks_; }
  bool has_failed() const { return !failed_.empty() || interrupted_.load(std::memory_order_acquire); }
  // Throws TransportError if there is one.
  void check();
  // From any thread.
  void interrupt(const std::string& reason);
  // `culprit`: because of whom, or -1.
  [[noreturn]] void fail(const std::string& message, int culprit);
  // Because `rank` did, before `what` was complete. One that names no culprit was probably interrupted from outside, by who is about to interrupt this rank too, with a
  // reason that says more: unless it is `late`, there is some time for that first, in which whoever waits goes on.
  void fail_after(const std::string& what, int rank, bool late = false);
  // A peer that gave up without naming a culprit, or -1.
  int silent() const { return silent_; }

 private:
  const Board& board_;
  const int forks_;  // of this process when the engine was made
  std::string failed_;
  int silent_ = -1;  // first seen at silent_since_
  Clock::time_point silent_since_;

  std::mutex reason_mutex_;
  std::string reason_;
  std::atomic<bool> interrupted_{false};  // reason_ says why
};

}  // namespace torchddp::shm
