#include "gpu/communicator_state.h"

#include <cstdio>
#include <exception>

#include "common/signals.h"

namespace torchddp::gpu {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kPollInterval{200};
// How long to poll a call in progress without a pause; after that, at intervals. Most calls finish within some tens of
// microseconds, in which the calling thread could not queue anything else either.
constexpr microseconds kBusyPolling{200};

std::string in_ms(milliseconds time) { return std::to_string(time.count()) + " ms"; }

}  // namespace

std::string describe(const OperationLabel& label) {
  std::string text = label.name;
  if (label.numel >= 0) text += " of " + std::to_string(label.numel) + " elements";
  return label.bucket < 0 ? text : text + " (bucket " + std::to_string(label.bucket) + ")";
}

// From here on only the watchdog calls NCCL for this communicator, and only to abort it.
void Communicator::State::mark_broken(std::string what) {
  if (life == Life::kMaking || life == Life::kRunning) {
    life = Life::kBroken;
    problem = std::move(what);
    changed.notify_all();
  }
}

void Communicator::State::refuse_nested(const OperationLabel& label) {
  const std::lock_guard lock(mutex);
  if (inside && inside->thread == std::this_thread::get_id()) {
    throw TransportError(who() + ": " + describe(label) + " was started by a signal handler while " +
                         describe(inside->label) + " was being started in the same thread, and would wait for it");
  }
}

void Communicator::State::fail(std::string what) {
  const std::lock_guard lock(mutex);
  mark_broken(who() + ": " + std::move(what));
  throw TransportError(problem);
}

// Waits until a call has taken effect: on a non-blocking communicator it may still be in progress. The watchdog makes sure that
// this ends. If a signal handler raises here, the peers notice when the communicator ends.
void Communicator::State::settle(int result, const OperationLabel& label) {
  const auto since = Clock::now();
  SignalWatch signals(since);
  while (result == kNcclInProgress) {
    check();
    const auto now = Clock::now();
    if (signals.is_due(now)) {
      try {
        signals.look();
      } catch (...) {
        const std::lock_guard lock(mutex);
        mark_broken(who() + ": gave up, because a signal handler raised an exception in " + describe(label));
        throw;
      }
    }
    if (now - since < kBusyPolling) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPollInterval);
    }
    if (const auto asked = nccl->async_error(comm, &result); asked != kNcclSuccess) result = asked;
  }
  check();  // an aborted communicator can't describe its errors
  if (result != kNcclSuccess) fail(describe(label) + " failed: " + nccl->describe(result, comm));
}

// --- the thread that makes the communicator, and watches it ---

void Communicator::State::make(const UniqueId& id) {
  auto result = kNcclSuccess;
  std::string error;
  try {
    result = nccl->init_rank(&made, config.size, id, config.rank, config.settings);
  } catch (const std::exception& failed) {
    error = failed.what();
  }
  std::unique_lock lock(mutex);
  while (result == kNcclInProgress && life == Life::kMaking) {
    lock.unlock();
    std::this_thread::sleep_for(kPollInterval);
    const auto asked = nccl->async_error(made, &result);
    result = asked != kNcclSuccess ? asked : result;
    lock.lock();
  }
  comm = made;
  if (life == Life::kMaking && error.empty() && result == kNcclSuccess) {
    life = Life::kRunning;
    changed.notify_all();
    return;
  }
  mark_broken(who() +
              ": could not create an NCCL communicator: " + (error.empty() ? nccl->describe(result, comm) : error));
}

// Runs in the thread that creates the communicator.
void Communicator::State::await_making() {
  std::unique_lock lock(mutex);
  try {
    if (!wait_with_signals(changed, lock, deadline_after(config.connect_timeout),
                           [&] { return life != Life::kMaking; })) {
      mark_broken(who() + ": could not create an NCCL communicator within " + in_ms(config.connect_timeout) +
                  ". Some rank has not joined it, or can't be reached");
    }
  } catch (...) {
    lock.lock();
    mark_broken(who() + ": gave up, because a signal handler raised an exception");
    throw;
  }
  throw_if_broken();
}

// Returns what is wrong; empty if nothing is.
std::string Communicator::State::find_problem() {
  if (inside) {
    // No other NCCL function may be called meanwhile.
    const auto& label = inside->label;
    return Clock::now() < deadline_after(label.timeout, inside->since)
               ? ""
               : with_advice(describe(label) + " did not start within " + in_ms(label.timeout) +
                             "; the communicator was aborted.");
  }
  if (in_flight.empty() && !captured) return "";
  try {
    int error = kNcclSuccess;
    const auto asked = nccl->async_error(comm, &error);
    const auto result = asked != kNcclSuccess ? asked : error;
    if (result != kNcclSuccess && result != kNcclInProgress) {
      const auto during = in_flight.empty() ? "" : ", during " + describe(in_flight.oldest().label);
      return with_advice("NCCL reports: " + nccl->describe(result, comm) + during + ".");
    }
    in_flight.retire(*device, in_flight.size());
    if (!in_flight.empty() && Clock::now() >= in_flight.deadline()) {
      const auto& label = in_flight.oldest().label;
      return with_advice(describe(label) + " did not finish within " + in_ms(label.timeout) +
                         "; the communicator was aborted.");
    }
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

void Communicator::State::look() {
  const auto found = find_problem();
  if (found.empty()) return;
  mark_broken(who() + ": " + found);
  if (captured) {
    std::fprintf(stderr, "torchddp: %s\n", problem.c_str());  // a program that replays a graph never asks us
  }
}

void Communicator::State::watch() {
  std::unique_lock lock(mutex);
  while (life == Life::kRunning) {
    if (!changed.wait_for(lock, config.watch_interval, [&] { return life != Life::kRunning; })) look();
  }
  if (life != Life::kBroken) return;
  if (comm != nullptr) {
    changed.wait_for(lock, config.call_grace, [&] { return !inside; });
    lock.unlock();
    try {
      nccl->abort(comm);  // may block; see Note [Errors of the device are found by a watchdog]
    } catch (const std::exception&) {
      // The device is lost, so there is nothing left to abort.
    }
    lock.lock();
  }
  life = Life::kAborted;
  changed.notify_all();
}

// --- leaving ---

// On its own thread, because NCCL waits for peers here.
void Communicator::State::leave(milliseconds timeout) {
  try {
    const OperationLabel label{"leaving an NCCL communicator", -1, -1, timeout};
    const Turn turn(*this, label);
    settle(nccl->finalize(comm), label);
    {
      const std::lock_guard lock(mutex);
      throw_if_broken();
      inside->label.timeout = milliseconds::max();  // a communicator that is being destroyed can't be aborted
    }
    nccl->destroy(comm);
    const std::lock_guard lock(mutex);
    mark_left();
  } catch (const std::exception&) {
    // Broken: the watchdog aborts it.
  }
}

}  // namespace torchddp::gpu
