// A forked child has copies of its parent's objects, but not the threads, peers and locks behind them.
#pragma once

#include <pthread.h>

#include <atomic>

namespace torchddp {

inline constexpr auto kForkedAway = "this process was forked from the rank that opened the transport, and can't use it";
inline std::atomic<int> counted_forks{0};

// How many forks led to this process, counted in the child from the first call on. An object that stores the count of its
// creation can tell, for the price of a load, whether it is still in the process that made it.
inline int forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { counted_forks.fetch_add(1); });
  static_cast<void>(registered);
  return counted_forks.load(std::memory_order_relaxed);
}

}  // namespace torchddp
