// Lets a call through now and then, however often it is made.
#pragma once

#include <atomic>
#include <chrono>

namespace torchddp {

// Thread-safe: of calls at the same time one gets through.
class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  // `interval`: at least so long after one call the next one gets through.
  explicit Pace(std::chrono::nanoseconds interval) : interval_(interval) {}

  bool is_due(Clock::time_point now = Clock::now()) {
    auto due = due_.load(std::memory_order_relaxed);
    return now.time_since_epoch() >= due &&
           due_.compare_exchange_strong(due, now.time_since_epoch() + interval_, std::memory_order_relaxed);
  }

 private:
  const Clock::duration interval_;
  std::atomic<Clock::duration> due_{Clock::duration::min()};
};

}  // namespace torchddp
