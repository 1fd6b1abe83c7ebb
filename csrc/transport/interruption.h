// Ends a transport's waits from another thread.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "common/forks.h"

namespace torchddp::transport {

// Thread-safe. Once raised, it stays raised, with the first reason.
class Interruption {
 public:
  void raise(const std::string& reason) const;
  // Throws TransportError with the reason if it was raised, or in a forked child, where nothing would end a wait.
  void check() const {
    if (state_->raised.load(std::memory_order_acquire) || state_->made_in != forks()) fail();
  }
  // Waits until the future is complete, successfully or not, or this is raised (then as check()). False if `limit` has passed
  // (0: no limit). Runs signal handlers meanwhile; an exception from one raises this too. Not for futures that only complete
  // when waited for.
  bool wait_for(c10::ivalue::Future& future, std::chrono::milliseconds limit = std::chrono::milliseconds(0)) const;

 private:
  [[noreturn]] void fail() const;

  // Shared with the callbacks of futures, which may complete after the transport is gone.
  struct State {
    const int made_in = forks();
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> raised{false};
    std::string reason;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace torchddp::transport
