#include "transport/interruption.h"

#include "common/deadline.h"
#include "common/errors.h"
#include "common/signals.h"

namespace torchddp::transport {

void Interruption::raise(const std::string& reason) const {
  const std::lock_guard lock(state_->mutex);
  if (state_->raised.load(std::memory_order_relaxed)) return;
  state_->reason = reason;
  state_->raised.store(true, std::memory_order_release);
  state_->changed.notify_all();
}

bool Interruption::wait_for(c10::ivalue::Future& future, std::chrono::milliseconds limit) const {
  check();
  if (future.completed()) return true;
  future.addCallback(
      [state = state_](c10::ivalue::Future&) {
        // Under the lock, or the waiter could miss it between its check and its sleep.
        const std::lock_guard lock(state->mutex);
        state->changed.notify_all();
      },
      /*uses_future=*/false);
  const auto over = [&] { return state_->raised.load(std::memory_order_relaxed) || future.completed(); };
  const auto deadline = limit.count() > 0 ? deadline_after(limit) : std::chrono::steady_clock::time_point::max();
  try {
    std::unique_lock lock(state_->mutex);
    wait_with_signals(state_->changed, lock, deadline, over);
  } catch (const SignalInterrupt&) {
    // The operation continues without this rank: starting another would wait for peers that are still at this one.
    raise("this rank gave up: a signal handler raised an exception while it waited for the others");
    throw;
  }
  check();
  return future.completed();
}

void Interruption::fail() const {
  if (state_->made_in != forks()) throw TransportError(kForkedAway);  // the mutex may be held
  const std::lock_guard lock(state_->mutex);
  throw TransportError(state_->reason);
}

}  // namespace torchddp::transport
