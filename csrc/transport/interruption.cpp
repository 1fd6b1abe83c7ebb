#include "transport/interruption.h"

#include "common/deadline.h"
#include "common/errors.h"

namespace torchddp::transport {

void Interruption::raise(const std::string& reason) {
  const std::lock_guard lock(state_->mutex);
  if (!state_->raised.load(std::memory_order_relaxed)) {
    state_->reason = reason;
    state_->raised.store(true, std::memory_order_release);
    state_->changed.notify_all();
  }
}

bool Interruption::wait_for(c10::ivalue::Future& future, std::chrono::milliseconds limit) const {
  check();
  if (future.completed()) {
    return true;
  }
  future.addCallback(
      [state = state_](c10::ivalue::Future&) {
        // With the lock, or the waiter could miss it between its look and its sleep.
        const std::lock_guard lock(state->mutex);
        state->changed.notify_all();
      },
      /*uses_future=*/false);
  {
    std::unique_lock lock(state_->mutex);
    const auto over = [&] { return state_->raised.load(std::memory_order_relaxed) || future.completed(); };
    if (limit.count() > 0) {
      state_->changed.wait_until(lock, deadline_after(limit), over);
    } else {
      state_->changed.wait(lock, over);
    }
  }
  check();
  return future.completed();
}

void Interruption::fail() const {
  const std::lock_guard lock(state_->mutex);
  throw TransportError(state_->reason);
}

}  // namespace torchddp::transport
