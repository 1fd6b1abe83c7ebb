#include "gpu/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include "common/deadline.h"
#include "common/errors.h"
#include "common/signals.h"

namespace torchddp::gpu {
namespace {

using Clock = std::chrono::steady_clock;
// A call that is in progress is asked about without a pause for so long, then at intervals: most are through in some tens of
// microseconds, in which the calling thread could not queue anything else either.
constexpr std::chrono::microseconds kBusyPolling{200};
constexpr std::chrono::microseconds kPollInterval{200};
constexpr std::chrono::milliseconds kAbortGrace{1000};
// Finished operations that a new one puts away; more than one, so that none pile up.
constexpr int kRetireAtOnce = 2;

std::string in_ms(std::chrono::milliseconds time) { return std::to_string(time.count()) + " ms"; }

}  // namespace

// Shared with the watchdog, which may outlive the communicator if NCCL's abort hangs.
struct Communicator::State {
  struct InFlight {
    OperationLabel label;
    Event done;
    Clock::time_point queued;
    std::shared_ptr<void> keep;
  };
  struct Block {
    void* memory;
    const Window* window;  // null if it is no window
  };
  enum class Life { kRunning, kBroken, kAborted, kLeft };

  std::shared_ptr<Nccl> nccl;
  std::shared_ptr<Device> device;
  CommunicatorConfig config;
  const pid_t pid = getpid();

  std::mutex mutex;
  std::condition_variable changed;
  Life life = Life::kRunning;
  bool stop_watching = false;
  std::string problem;
  Comm comm = nullptr;
  Stream stream = nullptr;
  Event fork = nullptr;
  uint64_t next = 1;                          // number of the next operation
  std::deque<InFlight> in_flight;             // the last is number next - 1
  Clock::time_point last_end = Clock::now();  // when the device was last seen to have finished one
  std::vector<Event> free_events;
  std::vector<std::shared_ptr<void>> done_with;  // let go of by the caller's threads, see retire()
  std::vector<Block> graveyard;                  // freed by their owners, see reclaim()
  std::deque<Window> windows;                    // NCCL writes them whenever it gets to it: they stay where they are
  bool closed = false;                           // the communicator is gone, its memory may not be
  bool captured = false;                         // some operation became part of a graph
  bool runs_handlers = false;                    // of signals, by a thread whose call is in progress

  std::string who() const { return "rank " + std::to_string(config.rank) + " of " + std::to_string(config.size); }
  std::string describe(const OperationLabel& label) const {
    auto text = std::string(label.name) + " of " + std::to_string(label.numel) + " elements";
    return label.bucket < 0 ? text : text + " (bucket " + std::to_string(label.bucket) + ")";
  }

  // Of Communicator::interrupt: calls hold the mutex while NCCL gets under way.
  std::mutex interrupt_mutex;
  std::string interrupt_reason;
  std::atomic<bool> interrupted{false};

  void obey_interrupt() {
    if (interrupted.load(std::memory_order_acquire) && life == Life::kRunning) {
      const std::lock_guard lock(interrupt_mutex);
      life = Life::kBroken;
      problem = interrupt_reason;
      changed.notify_all();
    }
  }

  void throw_if_broken() {
    obey_interrupt();
    if (life != Life::kRunning) {
      throw TransportError(problem);
    }
  }

  // From here on nobody but the watchdog calls NCCL for this communicator, and that only to abort it.
  void mark_broken(std::string what) {
    if (life == Life::kRunning) {
      life = Life::kBroken;
      problem = who() + ": " + std::move(what);
      changed.notify_all();
    }
  }
  [[noreturn]] void fail(std::string what) {
    mark_broken(std::move(what));
    throw TransportError(problem);
  }

  // For calls of NCCL.
  std::unique_lock<std::mutex> enter() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return !runs_handlers; });
    return lock;
  }

  // While a call is in progress. The peers hear of a handler that raises by the end of the communicator.
  void run_handlers(SignalWatch& signals, const std::string& what, std::unique_lock<std::mutex>& lock) {
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
  void settle(int result, const std::string& what, std::unique_lock<std::mutex>* lock) {
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

  Event take_event() {
    if (free_events.empty()) {
      return device->make_event();
    }
    auto* event = free_events.back();
    free_events.pop_back();
    return event;
  }

  // Puts finished operations away, oldest first. What they held is let go of by the next caller: the watchdog must not run foreign
  // destructors, which may want Python's lock.
  void retire(int at_most) {
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

  void look() {
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
  std::string during() const { return in_flight.empty() ? "" : ", during " + describe(in_flight.front().label); }

  void watch() {
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

  void free_block(const Block& block) {
    if (block.window != nullptr && *block.window != nullptr && life == Life::kRunning) {
      nccl->window_deregister(comm, *block.window);
    }
    nccl->memory_free(block.memory);
  }

  // A block has no owner any more; the device may still use it.
  void release(const Block& block) noexcept {
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
  void reclaim(std::unique_lock<std::mutex>& lock) {
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
  void destroy_streams() {
    for (auto* event : std::exchange(free_events, {})) {
      device->destroy_event(event);
    }
    device->destroy_event(fork);
    device->destroy_stream(stream);
  }

  void empty_graveyard() {
    for (const auto& block : std::exchange(graveyard, {})) {
      free_block(block);
    }
  }
};

Communicator::Communicator(std::shared_ptr<Nccl> nccl, std::shared_ptr<Device> device, CommunicatorConfig config,
                           const UniqueId& id)
    : state_(std::make_shared<State>()) {
  auto& state = *state_;
  state.nccl = std::move(nccl);
  state.device = std::move(device);
  state.config = config;
  if (const auto problem = version_problem(state.nccl->version(), state.nccl->built_version()); !problem.empty()) {
    throw TransportError(problem);
  }
  state.stream = state.device->make_stream();
  state.fork = state.device->make_event();
  watchdog_ = std::thread([state = state_] { state->watch(); });
  try {
    auto lock = state.enter();
    const auto result = state.nccl->init_rank(&state.comm, config.size, id, config.rank);
    if (state.comm == nullptr) {
      // Nothing to abort.
      state.life = State::Life::kLeft;
      state.changed.notify_all();
      throw TransportError(state.who() +
                           ": could not make a NCCL communicator: " + state.nccl->describe(result, nullptr));
    }
    state.settle(result, "making a NCCL communicator", &lock);
  } catch (...) {
    std::unique_lock lock(state.mutex);
    if (state.life == State::Life::kRunning) {
      state.mark_broken("making a NCCL communicator failed");
    }
    state.changed.wait_until(lock, deadline_after(config.leave_timeout),
                             [&] { return state.life != State::Life::kBroken; });
    const bool ended = state.life != State::Life::kBroken;
    lock.unlock();
    if (ended) {
      watchdog_.join();
      state.destroy_streams();
    } else {
      watchdog_.detach();
    }
    throw;
  }
}

Communicator::~Communicator() {
  if (getpid() != state_->pid) {
    // A forked child: the rank is still there, and here are neither its watchdog nor its device. What the watchdog waits on must not
    // be destroyed, for that would wait for the watchdog.
    watchdog_.detach();
    new std::shared_ptr<State>(std::move(state_));
    return;
  }
  auto& state = *state_;
  const auto deadline = deadline_after(state.config.leave_timeout);
  std::unique_lock lock(state.mutex);
  while (state.life == State::Life::kRunning && !state.in_flight.empty() && Clock::now() < deadline) {
    state.look();
    lock.unlock();
    std::this_thread::sleep_for(kPollInterval);
    lock.lock();
  }
  if (state.life == State::Life::kRunning && state.in_flight.empty() && state.captured) {
    // NCCL would wait, without end, for graphs that hold operations of this communicator to be destroyed: it is left as it is.
    state.life = State::Life::kLeft;
  } else if (state.life == State::Life::kRunning && state.in_flight.empty()) {
    // Flushes what NCCL's own threads still have to send to peers.
    try {
      state.config.connect_timeout = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      state.settle(state.nccl->finalize(state.comm), "leaving a NCCL communicator", nullptr);
      state.nccl->destroy(state.comm);
      state.life = State::Life::kLeft;
    } catch (const TransportError&) {
      // Broken: the watchdog aborts it.
    }
  } else {
    state.mark_broken("left while " + std::to_string(state.in_flight.size()) + " operations were under way");
  }
  state.stop_watching = true;
  state.changed.notify_all();
  // An abort is quick, but its thread may have to wait for a processor.
  state.changed.wait_until(lock, std::max(deadline, Clock::now() + kAbortGrace),
                           [&] { return state.life != State::Life::kBroken; });
  const bool ended = state.life != State::Life::kBroken;
  auto keeps = std::move(state.done_with);
  lock.unlock();
  if (!ended) {
    watchdog_.detach();  // it goes on waiting for NCCL, with everything that it needs
    return;
  }
  watchdog_.join();
  keeps.clear();
  try {
    state.device->synchronize();
  } catch (const std::exception&) {
    // The device is lost; so is what it used.
  }
  lock.lock();
  state.closed = true;
  state.empty_graveyard();
  auto left = std::exchange(state.in_flight, {});
  lock.unlock();
  for (const auto& operation : left) {
    state.device->destroy_event(operation.done);
  }
  left.clear();  // may release blocks, without the lock
  state.destroy_streams();
}

int Communicator::rank() const { return state_->config.rank; }
int Communicator::size() const { return state_->config.size; }
Nccl& Communicator::nccl() { return *state_->nccl; }

void Communicator::start(Ticket& ticket, const OperationLabel& label, const Call& call, std::shared_ptr<void> keep) {
  auto& state = *state_;
  std::vector<std::shared_ptr<void>> keeps;  // let go of without the lock
  auto lock = state.enter();
  state.throw_if_broken();
  try {
    auto& device = *state.device;
    state.retire(kRetireAtOnce);
    keeps = std::exchange(state.done_with, {});
    auto* const compute = device.current_stream();
    const bool captured = device.capturing(compute);
    device.record(state.fork, compute);
    device.wait(state.stream, state.fork);
    state.settle(call(state.comm, state.stream), state.describe(label), &lock);
    ticket.captured = captured;
    if (captured) {
      state.captured = true;
      if (ticket.event == nullptr) {
        ticket.event = device.make_event();
      }
      device.record(ticket.event, state.stream);
      return;
    }
    auto* const done = state.take_event();
    device.record(done, state.stream);
    state.in_flight.push_back({label, done, Clock::now(), std::move(keep)});
    ticket.number = state.next++;
  } catch (const CaptureError&) {
    throw;  // the graph is spoilt, the communicator is not
  } catch (const DeviceError& error) {
    state.fail(state.describe(label) + " could not be queued: " + error.what());
  }
}

void Communicator::join(Ticket& ticket) {
  auto& state = *state_;
  std::vector<std::shared_ptr<void>> keeps;
  const std::lock_guard lock(state.mutex);
  state.throw_if_broken();
  try {
    keeps = std::exchange(state.done_with, {});
    auto* const current = state.device->current_stream();
    if (ticket.captured) {
      state.device->wait(current, ticket.event);
      return;
    }
    const auto oldest = state.next - state.in_flight.size();
    if (ticket.number >= oldest && ticket.number < state.next) {
      state.device->wait(current, state.in_flight[ticket.number - oldest].done);
    }
  } catch (const CaptureError&) {
    throw;
  } catch (const DeviceError& error) {
    state.fail(std::string("waiting for an operation failed: ") + error.what());
  }
}

bool Communicator::ended(const Ticket& ticket) {
  auto& state = *state_;
  const std::lock_guard lock(state.mutex);
  if (ticket.captured || state.life != State::Life::kRunning) {
    return true;
  }
  const auto oldest = state.next - state.in_flight.size();
  return ticket.number < oldest || ticket.number >= state.next ||
         state.device->finished(state.in_flight[ticket.number - oldest].done);
}

void Communicator::forget(Ticket& ticket) {
  if (ticket.event != nullptr) {
    state_->device->destroy_event(ticket.event);
  }
  ticket = Ticket{};
}

void Communicator::interrupt(const std::string& reason) {
  {
    const std::lock_guard lock(state_->interrupt_mutex);
    if (state_->interrupted.load(std::memory_order_relaxed)) {
      return;
    }
    state_->interrupt_reason = reason;
    state_->interrupted.store(true, std::memory_order_release);
  }
  state_->changed.notify_all();
}

void Communicator::check() {
  const std::lock_guard lock(state_->mutex);
  state_->throw_if_broken();
}

bool Communicator::uses_windows() const {
  return state_->config.size > 1 && std::min(state_->nccl->version(), state_->nccl->built_version()) >= kWindowsVersion;
}

std::shared_ptr<void> Communicator::allocate(int64_t bytes) {
  auto& state = *state_;
  auto lock = state.enter();
  state.throw_if_broken();
  state.reclaim(lock);
  State::Block block{nullptr, nullptr};
  const auto result = state.nccl->memory_alloc(&block.memory, bytes);
  if (result != kNcclSuccess) {
    throw TransportError(state.who() + ": NCCL could not allocate " + std::to_string(bytes) +
                         " bytes for a bucket: " + state.nccl->describe(result, state.comm));
  }
  if (uses_windows()) {
    auto& window = state.windows.emplace_back(nullptr);
    const auto registered = state.nccl->window_register(state.comm, block.memory, bytes, &window);
    // Whatever it returns, the window is there only when the communicator says that nothing is in progress.
    state.settle(registered == kNcclSuccess ? kNcclInProgress : registered,
                 "registering " + std::to_string(bytes) + " bytes with NCCL", &lock);
    block.window = &window;
  }
  return {block.memory, [state = state_, block](void*) { state->release(block); }};
}

}  // namespace torchddp::gpu
