// Runs Python's signal handlers while a thread waits in C++.
//
// Note [Signals in a wait]
// Python runs signal handlers in its main thread between bytecode instructions, so a wait in C++ would delay them until it
// ends. A long wait therefore checks now and then whether a handler is due. The check needs the GIL, and its holder may want
// any lock of ours, as may a handler; so no lock is held meanwhile. If a handler raises, the wait throws that exception and
// gives up what it waited for. Only the main thread runs handlers; other threads wait as if there were none.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace torchddp {

// Exceptions raised by a handler also derive from this, so that they are not mistaken for an error of the operation waited for.
class SignalInterrupt {
 public:
  virtual ~SignalInterrupt() = default;
};

// Runs due handlers if this is the main thread, and throws what they raise. Null: there are no handlers.
inline std::atomic<void (*)()> signal_check{nullptr};

inline void check_signals() {
  if (auto* const check = signal_check.load()) check();
}

// The longest sleep between two checks, and how long a wait may take before the first. A check may take the GIL.
inline constexpr std::chrono::milliseconds kSignalInterval{100};

// Waits for `changed` until is_over() is true, which is checked under the lock; false if the deadline comes first. Runs handlers
// meanwhile, without the lock. If one raises, the lock is not held.
template <typename IsOver>
bool wait_with_signals(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                       std::chrono::steady_clock::time_point deadline, IsOver&& is_over) {
  while (true) {
    const auto until = std::min(deadline, std::chrono::steady_clock::now() + kSignalInterval);
    if (changed.wait_until(lock, until, is_over)) return true;
    if (until == deadline) return false;
    lock.unlock();
    check_signals();
    lock.lock();
  }
}

// Tells a wait that began at `begin` when to check.
class SignalWatch {
 public:
  using Clock = std::chrono::steady_clock;

  explicit SignalWatch(Clock::time_point begin) : next_(begin + kSignalInterval) {}

  bool is_due(Clock::time_point now) const { return now >= next_; }
  void look() {
    check_signals();
    next_ = Clock::now() + kSignalInterval;
  }

 private:
  Clock::time_point next_;
};

}  // namespace torchddp
