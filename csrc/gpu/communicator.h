// A NCCL communicator of our own, on its own stream.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "gpu/device.h"
#include "gpu/nccl.h"

namespace torchddp::gpu {

struct CommunicatorConfig {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds connect_timeout{std::chrono::minutes(2)};  // of the constructor
  std::chrono::milliseconds leave_timeout{std::chrono::seconds(10)};   // of everything the destructor does
  std::chrono::milliseconds watch_interval{100};
  // How long aborting a broken communicator waits for a call that is still inside NCCL, since the abort frees what that call
  // uses. A call that is about to return does so in this time; one that is stuck only checks whether it was aborted.
  std::chrono::milliseconds call_grace{500};
  CommSettings settings = {};
  bool high_priority = false;  // of the stream
};

// How errors refer to a NCCL call, and how long it may take.
struct OperationLabel {
  const char* name = "";
  int64_t numel = -1;   // -1: of no elements
  int64_t bucket = -1;  // -1: of no bucket
  // Applies to the call itself, in which NCCL may have to connect to peers, and then to the operation once the device reaches
  // it.
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
};

// One operation, to be joined later.
struct Ticket {
  uint64_t number = 0;    // 0: none
  Event event = nullptr;  // of an operation in a captured graph; owned by the ticket's holder, see Communicator::forget
  bool captured = false;
};

// Note [Errors of the device are found by a watchdog]
// The host never waits for an operation: it queues it and goes on, so no return value reports a dead peer. A thread of ours
// checks every watch_interval, off the critical path, whether NCCL reports an error, whether the oldest operation has taken too
// long, and whether a call is stuck inside NCCL (the first call of each kind connects to peers, which may not be there). If so,
// the communicator is broken: NCCL's abort ends the kernels and calls that wait for a peer, so that a host waiting for them
// returns, and every later call throws TransportError. What the broken operation wrote is garbage, and one optimizer step may
// already have used it; the next forward raises (Transport::check) before anything builds on it. The abort itself may hang in
// NCCL; no one waits for it longer than leave_timeout.
//
// A replayed graph makes no calls here. So after the first capture NCCL is asked for errors in every interval, and findings are
// also written to stderr, because the program may never ask. How long a replay takes can't be observed.
//
// Calls on one communicator must come in the same order on all ranks. Thread-safe. Only start() waits for calls of other
// threads.
class Communicator {
 public:
  using Call = std::function<int(Comm, Stream)>;

  // Collective: every rank passes the id that one of them made. Signal handlers run meanwhile. Throws TransportError.
  Communicator(std::shared_ptr<Nccl> nccl, std::shared_ptr<Device> device, CommunicatorConfig config,
               const UniqueId& id);
  ~Communicator();  // leaves
  Communicator& operator=(Communicator&&) = delete;

  int rank() const;
  int size() const;
  Nccl& nccl();

  // Queues `call` on the communicator's stream, after everything queued on the current stream so far. `keep` stays alive until
  // the operation is joined or the device is done with it. If the current stream is capturing a graph, the operation becomes
  // part of the graph and is not watched.
  void start(Ticket& ticket, const OperationLabel& label, const Call& call, std::shared_ptr<void> keep);
  // The current stream waits for the operation, and `keep` is released: anything queued there later in the same memory runs
  // after it. Throws TransportError if the communicator is broken.
  void join(Ticket& ticket);
  // Whether the operation has ended, successfully or not. Operations captured into a graph count as ended.
  bool ended(const Ticket& ticket);
  // The ticket will not be used any more.
  void forget(Ticket& ticket);
  // Thread-safe; does not wait. The watchdog aborts the communicator, and every later call throws TransportError(reason).
  void interrupt(const std::string& reason);
  // Flushes and leaves; aborts what does not end within leave_timeout. NCCL's part stays behind if a graph captured its
  // operations. Later calls throw. A process that ends calls it while the driver is still there.
  void leave();
  // Throws what broke the communicator, if it is broken.
  void check();
  bool is_broken() const;

 private:
  struct State;
  bool end_watchdog(std::chrono::steady_clock::time_point deadline);

  std::shared_ptr<State> state_;
  std::thread watchdog_;
  bool has_left_ = false;
};

}  // namespace torchddp::gpu
