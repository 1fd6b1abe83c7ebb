// A NCCL communicator of our own, on a stream of its own.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gpu/device.h"
#include "gpu/nccl.h"

namespace torchddp::gpu {

struct CommunicatorConfig {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};         // of an operation, on the device
  std::chrono::milliseconds connect_timeout{std::chrono::minutes(2)};  // of init, and of calls that are in progress
  std::chrono::milliseconds leave_timeout{std::chrono::seconds(10)};   // of everything the destructor does
  std::chrono::milliseconds watch_interval{100};
};

// What an operation is called in errors.
struct OperationLabel {
  const char* name = "";
  int64_t numel = 0;
  int64_t bucket = -1;  // -1: of no bucket
};

// One operation, to be joined.
struct Ticket {
  uint64_t number = 0;    // 0: none
  Event event = nullptr;  // of an operation in a captured graph; owned by the ticket's holder, see Communicator::forget
  bool captured = false;
};

// Note [Errors of the device are found by a watchdog]
// The host never waits for an operation: it queues it and goes on, so a dead peer is nobody's return value. A thread of ours looks
// every watch_interval, off the path of a step, whether NCCL reports an error and whether the oldest operation has taken too long.
// If so the communicator is broken: NCCL's abort makes the kernels that wait for a peer exit, so that a host that waits for the device
// comes back, and every later call throws TransportError. What the broken operation wrote is garbage, and one optimizer step may
// already have used it: the next forward raises (Transport::check), before anything is built on it. The abort itself may hang in NCCL; nobody waits for
// it longer than leave_timeout.
//
// Calls of one communicator must come in the same order on all ranks. Thread-safe.
class Communicator {
 public:
  using Call = std::function<int(Comm, Stream)>;

  // Collective: all ranks with the id that one of them made. Throws TransportError.
  Communicator(std::shared_ptr<Nccl> nccl, std::shared_ptr<Device> device, CommunicatorConfig config,
               const UniqueId& id);
  // Flushes and leaves; aborts what does not end within leave_timeout. NCCL's part stays behind if a graph was captured with it.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int size() const;
  Nccl& nccl();

  // Queues `call` on the communicator's stream, behind what is queued on the current stream now. `keep` stays alive until the
  // device is done. While the current stream captures a graph the operation becomes part of it, and nobody watches it.
  void start(Ticket& ticket, const OperationLabel& label, const Call& call, std::shared_ptr<void> keep);
  // The current stream waits for the operation. Throws TransportError if the communicator is broken.
  void join(Ticket& ticket);
  // Whether the operation has ended, well or not. Operations of a graph count as ended.
  bool ended(const Ticket& ticket);
  // The ticket will not be used any more.
  void forget(Ticket& ticket);
  // From any thread, without waiting: the watchdog aborts the communicator, and every later call throws TransportError(reason).
  void interrupt(const std::string& reason);
  // Throws what broke the communicator, if anything did.
  void check();

  // Memory that NCCL reaches best: registered as a window where the version allows and there is a peer. Collective then: equal sizes
  // in the same order. May be let go of at any time, but is given back at the next call or at the end, see Note [When windows are
  // freed]; a call waits until the device is idle if there is anything to give back. Throws TransportError.
  std::shared_ptr<void> allocate(int64_t bytes);
  bool uses_windows() const;

 private:
  struct State;
  bool end_watchdog(std::unique_lock<std::mutex>& lock, std::chrono::steady_clock::time_point deadline);

  std::shared_ptr<State> state_;
  std::thread watchdog_;
};

}  // namespace torchddp::gpu
