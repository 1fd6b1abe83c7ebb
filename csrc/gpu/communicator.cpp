#include "gpu/communicator.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "gpu/communicator_state.h"

namespace torchddp::gpu {
// An abort is fast, but its thread may have to wait for a processor.
constexpr std::chrono::milliseconds kAbortGrace{1000};
// How many finished operations a new one retires; more than one, so that they don't pile up.
constexpr size_t kRetireAtOnce = 2;

Communicator::Communicator(std::shared_ptr<Nccl> nccl, std::shared_ptr<Device> device, CommunicatorConfig config,
                           const UniqueId& id)
    : state_(std::make_shared<State>()) {
  auto& state = *state_;
  state.nccl = std::move(nccl);
  state.device = std::move(device);
  state.config = std::move(config);
  if (const auto problem = version_problem(state.nccl->version(), state.nccl->built_version()); !problem.empty()) {
    throw TransportError(problem);
  }
  state.stream = state.device->make_stream(state.config.high_priority);
  state.fork = state.device->make_event();
  watchdog_ = std::thread([state = state_, id] {
    state->make(id);
    state->watch();
  });
  try {
    state.await_making();
  } catch (...) {
    if (end_watchdog(deadline_after(kAbortGrace))) state.destroy_streams();
    throw;
  }
}

Communicator::~Communicator() {
  if (forks() != state_->made_in) {
    // A forked child: the rank lives on in the parent, and this process has neither its watchdog nor its device. What the
    // watchdog waits on must not be destroyed, because that would wait for the watchdog.
    watchdog_.detach();
    new std::shared_ptr<State>(std::move(state_));
    return;
  }
  leave();
}

void Communicator::leave() {
  auto& state = *state_;
  if (forks() != state.made_in || std::exchange(has_left_, true)) return;
  const auto deadline = deadline_after(state.config.leave_timeout);
  std::unique_lock lock(state.mutex);
  while (state.life == State::Life::kRunning && !state.in_flight.empty() && Clock::now() < deadline) {
    state.look();
    state.changed.wait_for(lock, std::chrono::microseconds(200));
  }
  if (!state.in_flight.empty()) {
    state.mark_broken(state.who() + ": left while " + std::to_string(state.in_flight.size()) +
                      " operations were under way");
  } else if (state.life == State::Life::kRunning && state.captured) {
    // NCCL would wait forever for graphs that hold operations of this communicator to be destroyed, so it is left as it is.
    state.mark_left();
  } else if (state.life == State::Life::kRunning) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    std::thread([state = state_, left] { state->leave(left); }).detach();
  }
  auto keeps = state.in_flight.take_keeps();
  lock.unlock();
  if (!end_watchdog(std::max(deadline, Clock::now() + kAbortGrace))) return;
  keeps.clear();
  try {
    state.in_flight.synchronize(*state.device);  // what was aborted may still write to its memory
  } catch (const std::exception&) {
    // The device is lost, and so is everything on it.
  }
  state.destroy_streams();
}

// For a communicator that was left or is broken. False if NCCL does not return: the threads that wait for it own what they
// need.
bool Communicator::end_watchdog(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(state_->mutex);
  const bool over = state_->changed.wait_until(lock, deadline, [&] { return state_->is_over(); });
  lock.unlock();
  over ? watchdog_.join() : watchdog_.detach();
  return over;
}

int Communicator::rank() const { return state_->config.rank; }
int Communicator::size() const { return state_->config.size; }
Nccl& Communicator::nccl() { return *state_->nccl; }

void Communicator::start(Ticket& ticket, const OperationLabel& label, const Call& call, std::shared_ptr<void> keep) {
  auto& state = *state_;
  OperationsInFlight::Keeps keeps;  // released without holding the locks
  try {
    const State::Turn turn(state, label);
    auto& device = *state.device;
    auto* const compute = device.current_stream();
    const bool captured = device.capturing(compute);
    device.record(state.fork, compute);
    device.wait(state.stream, state.fork);
    state.settle(call(state.comm, state.stream), label);
    ticket.captured = captured;
    if (captured && ticket.event == nullptr) ticket.event = device.make_event();
    const std::lock_guard lock(state.mutex);
    if (captured) {
      state.captured = true;
      device.record(ticket.event, state.stream);
      return;
    }
    state.in_flight.retire(device, kRetireAtOnce);
    keeps = state.in_flight.take_keeps();
    ticket.number = state.in_flight.add(device, state.stream, label, std::move(keep));
  } catch (const CaptureError&) {
    throw;  // the graph is invalid, the communicator is not
  } catch (const DeviceError& error) {
    state.fail(describe(label) + " could not be queued: " + error.what());
  }
}

void Communicator::join(Ticket& ticket) {
  auto& state = *state_;
  OperationsInFlight::Keeps keeps;
  try {
    const std::lock_guard lock(state.mutex);
    state.throw_if_broken();
    keeps = state.in_flight.take_keeps();
    auto* const operation = ticket.captured ? nullptr : state.in_flight.find(ticket);
    if (ticket.captured || operation != nullptr) {
      state.device->wait(state.device->current_stream(), ticket.captured ? ticket.event : operation->done);
    }
    if (operation != nullptr) keeps.push_back(std::move(operation->keep));
  } catch (const CaptureError&) {
    throw;
  } catch (const DeviceError& error) {
    state.fail(std::string("waiting for an operation failed: ") + error.what());
  }
}

bool Communicator::ended(const Ticket& ticket) {
  auto& state = *state_;
  const std::lock_guard lock(state.mutex);
  if (ticket.captured || state.life != State::Life::kRunning) return true;
  auto* const operation = state.in_flight.find(ticket);
  try {
    return operation == nullptr || state.device->finished(operation->done);
  } catch (const DeviceError& error) {
    state.mark_broken(std::string("asking for the end of an operation failed: ") + error.what());
    return true;  // wait() throws
  }
}

void Communicator::forget(Ticket& ticket) {
  if (ticket.event != nullptr) state_->device->destroy_event(ticket.event);
  ticket = Ticket{};
}

void Communicator::interrupt(const std::string& reason) {
  const std::lock_guard lock(state_->mutex);
  state_->mark_broken(reason);
}

void Communicator::check() { state_->check(); }

bool Communicator::is_broken() const {
  const std::lock_guard lock(state_->mutex);
  return state_->life != State::Life::kRunning;
}

}  // namespace torchddp::gpu
