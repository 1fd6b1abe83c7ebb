#include "gpu/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "common/deadline.h"
#include "common/errors.h"
#include "gpu/communicator_state.h"

namespace torchddp::gpu {
namespace {

constexpr std::chrono::milliseconds kAbortGrace{1000};
// Finished operations that a new one puts away; more than one, so that none pile up.
constexpr size_t kRetireAtOnce = 2;

}  // namespace

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
    state.mark_broken("making a NCCL communicator failed");
    if (end_watchdog(lock, deadline_after(config.leave_timeout))) {
      state.destroy_streams();
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
    std::this_thread::sleep_for(State::kPollInterval);
    lock.lock();
  }
  if (!state.in_flight.empty()) {
    state.mark_broken("left while " + std::to_string(state.in_flight.size()) + " operations were under way");
  } else if (state.life == State::Life::kRunning && state.captured) {
    // NCCL would wait, without end, for graphs that hold operations of this communicator to be destroyed: it is left as it is.
    state.life = State::Life::kLeft;
  } else if (state.life == State::Life::kRunning) {
    // Flushes what NCCL's own threads still have to send to peers.
    try {
      state.config.connect_timeout = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      state.settle(state.nccl->finalize(state.comm), "leaving a NCCL communicator", nullptr);
      state.nccl->destroy(state.comm);
      state.life = State::Life::kLeft;
    } catch (const TransportError&) {
      // Broken: the watchdog aborts it.
    }
  }
  auto keeps = state.in_flight.take_keeps();
  // An abort is quick, but its thread may have to wait for a processor.
  if (!end_watchdog(lock, std::max(deadline, Clock::now() + kAbortGrace))) {
    return;
  }
  keeps.clear();
  try {
    state.device->synchronize();
  } catch (const std::exception&) {
    // The device is lost; so is what it used.
  }
  lock.lock();
  state.closed = true;
  state.empty_graveyard();
  lock.unlock();
  state.destroy_streams();
}

// Of a communicator that is left or broken; gives the lock back. False if NCCL's abort does not end: the watchdog goes on waiting for
// it, with everything that it needs.
bool Communicator::end_watchdog(std::unique_lock<std::mutex>& lock, std::chrono::steady_clock::time_point deadline) {
  state_->stop_watching = true;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_until(lock, deadline, [&] { return state_->life != State::Life::kBroken; });
  lock.unlock();
  ended ? watchdog_.join() : watchdog_.detach();
  return ended;
}

int Communicator::rank() const { return state_->config.rank; }
int Communicator::size() const { return state_->config.size; }
Nccl& Communicator::nccl() { return *state_->nccl; }

void Communicator::start(Ticket& ticket, const OperationLabel& label, const Call& call, std::shared_ptr<void> keep) {
  auto& state = *state_;
  OperationsInFlight::Keeps keeps;  // let go of without the lock
  auto lock = state.enter();
  state.throw_if_broken();
  try {
    auto& device = *state.device;
    state.in_flight.retire(device, kRetireAtOnce);
    keeps = state.in_flight.take_keeps();
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
    ticket.number = state.in_flight.add(device, state.stream, label, std::move(keep));
  } catch (const CaptureError&) {
    throw;  // the graph is spoilt, the communicator is not
  } catch (const DeviceError& error) {
    state.fail(state.describe(label) + " could not be queued: " + error.what());
  }
}

void Communicator::join(Ticket& ticket) {
  auto& state = *state_;
  OperationsInFlight::Keeps keeps;
  const std::lock_guard lock(state.mutex);
  state.throw_if_broken();
  try {
    keeps = state.in_flight.take_keeps();
    if (auto* const done = ticket.captured ? ticket.event : state.in_flight.event_of(ticket)) {
      state.device->wait(state.device->current_stream(), done);
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
  auto* const done = state.in_flight.event_of(ticket);
  return done == nullptr || state.device->finished(done);
}

void Communicator::forget(Ticket& ticket) {
  if (ticket.event != nullptr) {
    state_->device->destroy_event(ticket.event);
  }
  ticket = Ticket{};
}

void Communicator::interrupt(const std::string& reason) {
  auto& interrupt = state_->interrupt;
  {
    const std::lock_guard lock(interrupt.mutex);
    if (interrupt.raised.load(std::memory_order_relaxed)) {
      return;
    }
    interrupt.reason = reason;
    interrupt.raised.store(true, std::memory_order_release);
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
