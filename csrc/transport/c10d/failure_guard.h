// Ends a process whose peers have failed while its interpreter is stuck.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "common/forks.h"

namespace torchddp::transport {

// Note [A stuck interpreter]
// The thread of torchddp.fail_together that ends a process needs Python's global lock. If an extension holds that lock for good,
// the rank outlives the failure of the others. This thread needs no lock of Python. It acts only if the Python thread has given
// no sign of life for `patience`, the store tells of a failure, and no rank is saving.
class FailureGuard {
 public:
  struct Keys {
    std::string failure;  // there once a rank has failed
    std::string saving;   // the counter of saves in progress
  };

  FailureGuard(c10::intrusive_ptr<c10d::Store> store, Keys keys, std::chrono::milliseconds patience,
               std::string last_words);
  // Waits for the thread, but not long: the store may not answer.
  ~FailureGuard();
  FailureGuard& operator=(FailureGuard&&) = delete;

  // The Python thread runs. `saving`: this rank is in a save, which may hold the interpreter for long.
  void sign(bool saving) {
    watch_->saving.store(saving, std::memory_order_relaxed);
    watch_->signed_at.store(Clock::now(), std::memory_order_relaxed);
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Watch {
    void run();
    void look();

    c10::intrusive_ptr<c10d::Store> store;
    Keys keys;
    std::chrono::milliseconds patience;
    std::string last_words;
    std::atomic<Clock::time_point> signed_at{Clock::now()};
    std::atomic<bool> saving{false};
    std::mutex mutex;
    std::condition_variable changed;
    bool ends = false;
    bool ended = false;
  };

  const int made_in_ = forks();
  const std::shared_ptr<Watch> watch_;  // the thread's, too
};

}  // namespace torchddp::transport
