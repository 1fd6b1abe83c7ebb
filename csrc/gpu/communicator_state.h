// State shared by a communicator's calls and its watchdog. Internal to gpu/.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/deadline.h"
#include "common/errors.h"
#include "common/forks.h"
#include "gpu/communicator.h"

namespace torchddp::gpu {

using Clock = std::chrono::steady_clock;

// For errors.
std::string describe(const OperationLabel& label);

// Operations on the communicator's stream that have not been seen to end, oldest first.
class OperationsInFlight {
 public:
  struct Operation {
    OperationLabel label;
    Event done;
    Clock::time_point queued;
    std::shared_ptr<void> keep;
  };
  using Keeps = std::vector<std::shared_ptr<void>>;

  // Appends an operation behind everything on the stream. Returns its number.
  uint64_t add(Device& device, Stream stream, const OperationLabel& label, std::shared_ptr<void> keep) {
    auto* const done = free_events_.empty() ? device.make_event() : free_events_.back();
    if (!free_events_.empty()) free_events_.pop_back();
    device.record(done, stream);
    operations_.push_back({label, done, Clock::now(), std::move(keep)});
    return next_++;
  }
  // Null if it was retired or never queued.
  Operation* find(const Ticket& ticket) {
    const auto oldest = next_ - operations_.size();
    return ticket.number >= oldest && ticket.number < next_ ? &operations_[ticket.number - oldest] : nullptr;
  }
  // Retires finished operations, oldest first. The next caller releases what they held: the watchdog must not run foreign
  // destructors, which may need the GIL.
  void retire(Device& device, size_t at_most) {
    while (at_most-- > 0 && !operations_.empty() && device.finished(operations_.front().done)) {
      auto& front = operations_.front();
      free_events_.push_back(front.done);
      if (front.keep != nullptr) done_with_.push_back(std::move(front.keep));
      operations_.pop_front();
      last_end_ = Clock::now();
    }
  }
  // What finished operations held, to be released without the lock.
  Keeps take_keeps() { return std::exchange(done_with_, {}); }

  bool empty() const { return operations_.empty(); }
  size_t size() const { return operations_.size(); }
  const Operation& oldest() const { return operations_.front(); }
  // Blocks until the device is done with all of them.
  void synchronize(Device& device) const {
    if (!operations_.empty()) device.synchronize(operations_.back().done);
  }
  // Of the oldest operation.
  Clock::time_point deadline() const {
    return deadline_after(oldest().label.timeout, std::max(oldest().queued, last_end_));
  }
  // Called without the lock, as it may release memory.
  void clear(Device& device) {
    for (auto* event : std::exchange(free_events_, {})) device.destroy_event(event);
    for (const auto& operation : operations_) device.destroy_event(operation.done);
    operations_.clear();
  }

 private:
  std::deque<Operation> operations_;           // the last is number next_ - 1
  uint64_t next_ = 1;                          // number of the next operation
  Clock::time_point last_end_ = Clock::now();  // when the device was last seen to finish one
  std::vector<Event> free_events_;
  Keeps done_with_;
};

// Shared with the communicator's threads, which outlive it if NCCL hangs.
struct Communicator::State {
  enum class Life { kMaking, kRunning, kBroken, kAborted, kLeft };
  class Turn;  // one NCCL call, from just before it is made until it has taken effect
  struct Inside {
    OperationLabel label;
    Clock::time_point since;
    std::thread::id thread;
  };

  std::shared_ptr<Nccl> nccl;
  std::shared_ptr<Device> device;
  CommunicatorConfig config;
  const int made_in = forks();

  std::mutex calls;  // its holder may call NCCL. Taken before the other mutex, and held for as long as NCCL takes
  std::mutex mutex;  // guards everything below; never held for long
  std::condition_variable changed;
  Life life = Life::kMaking;
  std::string problem;
  std::optional<Inside> inside;
  Comm made = nullptr;  // NCCL may write it later
  Comm comm = nullptr;
  Stream stream = nullptr;
  Event fork = nullptr;
  OperationsInFlight in_flight;
  bool captured = false;  // an operation was captured into a graph

  std::string who() const { return "rank " + std::to_string(config.rank) + " of " + std::to_string(config.size); }
  bool is_over() const { return (life == Life::kAborted || life == Life::kLeft) && !inside; }

  // With the mutex held.
  void throw_if_broken() const {
    if (life != Life::kRunning) throw TransportError(problem);
  }
  void mark_broken(std::string what);
  void mark_left() {
    life = Life::kLeft;
    problem = who() + ": the NCCL communicator has ended";
    changed.notify_all();
  }
  void look();
  // Without the mutex.
  void check() {
    const std::lock_guard lock(mutex);
    throw_if_broken();
  }
  void refuse_nested(const OperationLabel& label);
  [[noreturn]] void fail(std::string what);
  void settle(int result, const OperationLabel& label);
  // Called once the watchdog has ended.
  void destroy_streams() {
    in_flight.clear(*device);
    device->destroy_event(fork);
    device->destroy_stream(stream);
  }

  // Threads. One makes the communicator, then watches it.
  void make(const UniqueId& id);
  void watch();
  void leave(std::chrono::milliseconds timeout);

  void await_making();

 private:
  std::string find_problem();
};

// Throws TransportError if the communicator is broken, or if the thread is already inside (in a signal handler).
class Communicator::State::Turn {
 public:
  Turn(State& state, const OperationLabel& label) : state_(state) {
    state.refuse_nested(label);
    order_ = std::unique_lock(state.calls);
    const std::lock_guard lock(state.mutex);
    state.throw_if_broken();
    state.inside = Inside{label, Clock::now(), std::this_thread::get_id()};
  }
  ~Turn() {
    const std::lock_guard lock(state_.mutex);
    state_.inside.reset();
    if (state_.life != Life::kRunning) state_.changed.notify_all();
  }
  Turn& operator=(Turn&&) = delete;

 private:
  State& state_;
  std::unique_lock<std::mutex> order_;
};

}  // namespace torchddp::gpu
