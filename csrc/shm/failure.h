// Why an engine can't continue.
#pragma once

#include <chrono>
#include <string>

#include "common/errors.h"
#include "common/forks.h"
#include "shm/board.h"

namespace torchddp::shm {

// Used by one thread at a time, except for interrupt(). Once an engine has failed it stays so, and its peers see that.
class Failure {
 public:
  // `reason_patience` as in EngineConfig.
  Failure(const Board& board, std::chrono::milliseconds reason_patience)
      : board_(board), forks_(forks()), reason_patience_(reason_patience) {}

  // A forked child must not act for the rank.
  bool is_forked() const { return forks() != forks_; }
  bool has_failed() const { return !failed_.empty() || interrupted_.load(std::memory_order_acquire); }
  // Throws TransportError if there is one.
  void check();
  // Thread-safe.
  void interrupt(const std::string& reason);
  // `culprit`: the rank responsible, or -1.
  [[noreturn]] void fail(const std::string& message, int culprit);
  // Fails because `rank` did, before `what` was complete. A rank that names no culprit was probably interrupted from outside,
  // by something that is about to interrupt this rank too with a better reason. Unless `late`, it gets some time for that, and
  // the caller goes on waiting.
  void fail_after(const std::string& what, int rank, bool late = false);
  // A peer that gave up without naming a culprit, or -1.
  int silent() const { return silent_; }

 private:
  const Board& board_;
  const int forks_;  // of this process when the engine was created
  const std::chrono::milliseconds reason_patience_;
  std::string failed_;
  int silent_ = -1;  // first seen at silent_since_
  Clock::time_point silent_since_;

  Mutex reason_mutex_;
  std::string reason_;
  Atomic<bool> interrupted_{false};  // reason_ says why
};

}  // namespace torchddp::shm
