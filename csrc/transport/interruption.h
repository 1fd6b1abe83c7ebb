// Ends the waits of a transport from another thread.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

namespace torchddp::transport {

// Thread-safe. Once raised it stays so, with the first reason.
class Interruption {
 public:
  void raise(const std::string& reason) const;
  // Throws TransportError with the reason if it was raised.
  void check() const {
    if (state_->raised.load(std::memory_order_acquire)) {
      fail();
    }
  }
  // Until the future is complete, well or not, or it is raised: then as check(). False if `limit` has passed (0: there is none). Runs
  // the handlers of signals meanwhile; what one raises raises this too. Not for futures that complete only when somebody waits for them.
  bool wait_for(c10::ivalue::Future& future, std::chrono::milliseconds limit = std::chrono::milliseconds(0)) const;

 private:
  [[noreturn]] void fail() const;

  // Shared with the callbacks of futures, which may complete after the transport is gone.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> raised{false};
    std::string reason;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace torchddp::transport
