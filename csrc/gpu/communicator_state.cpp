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

uint64_t OperationsInFlight::add(Device& device, Stream stream, const OperationLabel& label,
                                 std::shared_ptr<void> keep) {
  auto* const done = free_events_.empty() ? device.make_event() : free_events_.back();
  if (!free_events_.empty()) {
    free_events_.pop_back();
  }
  device.record(done, stream);
  operations_.push_back({label, done, Clock::now(), std::move(keep)});
  return next_++;
}

Event OperationsInFlight::event_of(const Ticket& ticket) const {
  const auto oldest = next_ - operations_.size();
  return ticket.number >= oldest && ticket.number < next_ ? operations_[ticket.number - oldest].done : nullptr;
}

void OperationsInFlight::retire(Device& device, size_t at_most) {
  while (at_most-- > 0 && !operations_.empty() && device.finished(operations_.front().done)) {
    auto& front = operations_.front();
    free_events_.push_back(front.done);
    if (front.keep != nullptr) {
      done_with_.push_back(std::move(front.keep));
    }
    operations_.pop_front();
    last_end_ = Clock::now();
  }
}

Clock::time_point OperationsInFlight::deadline(std::chrono::milliseconds timeout) const {
  return deadline_after(timeout, std::max(oldest().queued, last_end_));
}

void OperationsInFlight::clear(Device& device) {
  for (auto* event : std::exchange(free_events_, {})) {
    device.destroy_event(event);
  }
  for (const auto& operation : operations_) {
    device.destroy_event(operation.done);
  }
  operations_.clear();
}

void Communicator::State::obey_interrupt() {
  if (interrupt.raised.load(std::memory_order_acquire) && life == Life::kRunning) {
    const std::lock_guard lock(interrupt.mutex);
    life = Life::kBroken;
    problem = interrupt.reason;
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

void Communicator::State::look() {
  try {
    int error = kNcclSuccess;
    const auto asked = nccl->async_error(comm, &error);
    const auto result = asked != kNcclSuccess ? asked : error;
    if (result != kNcclSuccess && result != kNcclInProgress) {
      const auto during = in_flight.empty() ? "" : ", during " + describe(in_flight.oldest().label);
      mark_broken("NCCL reports: " + nccl->describe(result, comm) + during);
      return;
    }
    in_flight.retire(*device, in_flight.size());
    if (!in_flight.empty() && Clock::now() >= in_flight.deadline(config.timeout)) {
      mark_broken(describe(in_flight.oldest().label) + " did not finish within " + in_ms(config.timeout) +
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
  if (in_flight.holds_nothing() && graveyard.empty()) {
    return;
  }
  lock.unlock();
  device->synchronize();  // not under the lock: the watchdog may have to end what the device waits for
  lock.lock();
  throw_if_broken();
  in_flight.retire(*device, in_flight.size());
  auto keeps = in_flight.take_keeps();
  lock.unlock();
  keeps.clear();  // may release blocks
  lock.lock();
  empty_graveyard();
}

// Once the watchdog has ended.
void Communicator::State::destroy_streams() {
  in_flight.clear(*device);
  device->destroy_event(fork);
  device->destroy_stream(stream);
}

void Communicator::State::empty_graveyard() {
  for (const auto& block : std::exchange(graveyard, {})) {
    free_block(block);
  }
}

}  // namespace torchddp::gpu
