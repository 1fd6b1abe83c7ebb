#include "gpu/communicator_state.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "common/deadline.h"
#include "common/errors.h"

namespace torchddp::gpu {
namespace {

// A call that is in progress is asked about without a pause for so long, then at intervals: most are through in some tens of
// microseconds, in which the calling thread could not queue anything else either.
constexpr std::chrono::microseconds kBusyPolling{200};

std::string in_ms(std::chrono::milliseconds time) { return std::to_string(time.count()) + " ms"; }

}  // namespace

void Communicator::State::obey_interrupt() {
  if (interrupted.load(std::memory_order_acquire) && life == Life::kRunning) {
    const std::lock_guard lock(interrupt_mutex);
    life = Life::kBroken;
    problem = interrupt_reason;
    changed.notify_all();
  }
}

void Communicator::State::throw_if_broken() {
  obey_interrupt();
  if (life != Life::kRunning) {
    throw TransportError(problem);
  }
}

// From here on nobody but the watchdog calls NCCL for this communicator, and that only to abort it.
void Communicator::State::mark_broken(std::string what) {
  if (life == Life::kRunning) {
    life = Life::kBroken;
    problem = who() + ": " + std::move(what);
    changed.notify_all();
  }
}

void Communicator::State::fail(std::string what) {
  mark_broken(std::move(what));
  throw TransportError(problem);
}

// For calls of NCCL.
std::unique_lock<std::mutex> Communicator::State::enter() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return !runs_handlers; });
  return lock;
}

// While a call is in progress. The peers hear of a handler that raises by the end of the communicator.
void Communicator::State::run_handlers(SignalWatch& signals, const std::string& what,
                                       std::unique_lock<std::mutex>& lock) {
  std::exception_ptr raised;
  runs_handlers = true;
  lock.unlock();
  try {
    signals.look();
  } catch (...) {
    raised = std::current_exception();
  }
  lock.lock();
  runs_handlers = false;
  changed.notify_all();
  if (raised != nullptr) {
    mark_broken("gave up, for the handler of a signal raised an exception in " + what);
    std::rethrow_exception(raised);
  }
}

// Until a call of a non-blocking communicator has taken effect: no other may be made before that. `lock`, on the mutex, is given back
// while the handlers of signals run; null: they don't.
void Communicator::State::settle(int result, const std::string& what, std::unique_lock<std::mutex>* lock) {
  const auto since = Clock::now();
  const auto deadline = deadline_after(config.connect_timeout, since);
  SignalWatch signals(since);
  while (result == kNcclInProgress) {
    throw_if_broken();
    const auto now = Clock::now();
    if (lock != nullptr && signals.is_due(now)) {
      run_handlers(signals, what, *lock);
      throw_if_broken();
    }
    if (now >= deadline) {
      fail(what + " did not get under way within " + in_ms(config.connect_timeout) +
           ". Some rank has not reached it, or can't be reached");
    }
    if (now - since < kBusyPolling) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPollInterval);
    }
    const auto asked = nccl->async_error(comm, &result);
    if (asked != kNcclSuccess) {
      result = asked;
    }
  }
  if (result != kNcclSuccess) {
    fail(what + " failed: " + nccl->describe(result, comm));
  }
}

Event Communicator::State::take_event() {
  if (free_events.empty()) {
    return device->make_event();
  }
  auto* event = free_events.back();
  free_events.pop_back();
  return event;
}

// Puts finished operations away, oldest first. What they held is let go of by the next caller: the watchdog must not run foreign
// destructors, which may want Python's lock.
void Communicator::State::retire(int at_most) {
  while (at_most-- > 0 && !in_flight.empty() && device->finished(in_flight.front().done)) {
    auto& front = in_flight.front();
    free_events.push_back(front.done);
    if (front.keep != nullptr) {
      done_with.push_back(std::move(front.keep));
    }
    in_flight.pop_front();
    last_end = Clock::now();
  }
}

void Communicator::State::look() {
  try {
    int error = kNcclSuccess;
    const auto asked = nccl->async_error(comm, &error);
    const auto result = asked != kNcclSuccess ? asked : error;
    if (result != kNcclSuccess && result != kNcclInProgress) {
      mark_broken("NCCL reports: " + nccl->describe(result, comm) + during());
      return;
    }
    retire(static_cast<int>(in_flight.size()));
    if (in_flight.empty()) {
      return;
    }
    const auto& oldest = in_flight.front();
    if (Clock::now() >= deadline_after(config.timeout, std::max(oldest.queued, last_end))) {
      mark_broken(describe(oldest.label) + " did not finish within " + in_ms(config.timeout) +
                  ". Some rank did not start it, is gone, or can't be reached; the communicator was aborted");
    }
  } catch (const std::exception& error) {
    mark_broken(error.what());
  }
}

void Communicator::State::watch() {
  std::unique_lock lock(mutex);
  while (life == Life::kRunning && !stop_watching) {
    changed.wait_for(lock, config.watch_interval);
    obey_interrupt();
    if (life == Life::kRunning && !stop_watching && !in_flight.empty()) {
      look();
    }
  }
  if (life == Life::kBroken) {
    lock.unlock();
    try {
      nccl->abort(comm);  // may block; see Note [Errors of the device are found by a watchdog]
    } catch (const std::exception&) {
      // The device is lost: there is nothing left to abort.
    }
    lock.lock();
    life = Life::kAborted;
    changed.notify_all();
  }
}

void Communicator::State::free_block(const Block& block) {
  if (block.window != nullptr && *block.window != nullptr && life == Life::kRunning) {
    nccl->window_deregister(comm, *block.window);
  }
  nccl->memory_free(block.memory);
}

// A block has no owner any more; the device may still use it.
void Communicator::State::release(const Block& block) noexcept {
  if (getpid() != pid) {
    return;  // a forked child: it is the parent's
  }
  try {
    bool closed_already = false;
    {
      const std::lock_guard lock(mutex);
      closed_already = closed;
      if (!closed_already) {
        graveyard.push_back(block);
      }
    }
    if (closed_already) {
      device->synchronize();
      const std::lock_guard lock(mutex);
      free_block(block);
    }
  } catch (const std::exception&) {
    // The device is lost, and its memory with it.
  }
}

// Note [When windows are freed]
// NCCL places windows at offsets that each rank works out alone from what is free, and they must come out equal: so memory is
// given back at the same points of the program on all ranks, right before the next is registered, and not when the last reference
// happens to go. It waits until the device is idle: nothing of a step allocates.
void Communicator::State::reclaim(std::unique_lock<std::mutex>& lock) {
  if (in_flight.empty() && done_with.empty() && graveyard.empty()) {
    return;
  }
  lock.unlock();
  device->synchronize();  // not under the lock: the watchdog may have to end what the device waits for
  lock.lock();
  throw_if_broken();
  retire(static_cast<int>(in_flight.size()));
  auto keeps = std::exchange(done_with, {});
  lock.unlock();
  keeps.clear();  // may release blocks
  lock.lock();
  empty_graveyard();
}

// Once the watchdog has ended.
void Communicator::State::destroy_streams() {
  for (auto* event : std::exchange(free_events, {})) {
    device->destroy_event(event);
  }
  device->destroy_event(fork);
  device->destroy_stream(stream);
}

void Communicator::State::empty_graveyard() {
  for (const auto& block : std::exchange(graveyard, {})) {
    free_block(block);
  }
}

}  // namespace torchddp::gpu
