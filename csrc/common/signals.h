// Handlers of signals that arrive while a thread waits.
//
// Note [Signals in a wait]
// Python runs the handlers of signals in its main thread, between its own instructions: a wait in C++ would hold them up until it ends.
// So who waits for long asks now and then whether there is one to run. Python does not tell without the GIL, and who has that may want
// any lock of ours, as a handler may: so no lock is held meanwhile. If a handler raises, the wait throws that exception, and what was
// waited for is given up. Only the main thread runs handlers; others wait as if there were none.
#pragma once

#include <atomic>
#include <chrono>

namespace torchddp {

// What a handler raised derives from this too, so that it is not taken for an error of what was waited for.
class SignalInterrupt {
 public:
  virtual ~SignalInterrupt() = default;
};

// Runs handlers if this is the thread that does; throws what they raise. Null: there are none.
inline std::atomic<void (*)()> signal_check{nullptr};

inline void check_signals() {
  if (auto* const check = signal_check.load()) {
    check();
  }
}

// How long to sleep at most between two looks; also how long a wait may take before the first. Looking may take the GIL.
inline constexpr std::chrono::milliseconds kSignalInterval{100};

// When a wait that began at `begin` has to look.
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
