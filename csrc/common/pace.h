// Rate limit: lets a call through only once per interval.
#pragma once

#include <atomic>
#include <chrono>

namespace torchddp {

// Thread-safe: of concurrent calls, one gets through.
class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  // `interval`: the minimum time between two calls that get through.
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
