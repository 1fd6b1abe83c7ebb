// What a communicator's calls and its watchdog share. Not for use outside of gpu/.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/signals.h"
#include "gpu/communicator.h"

namespace torchddp::gpu {

using Clock = std::chrono::steady_clock;

// Operations on the communicator's stream that nobody has seen to end, oldest first.
class OperationsInFlight {
 public:
  struct Operation {
    OperationLabel label;
    Event done;
    Clock::time_point queued;
    std::shared_ptr<void> keep;
  };
  using Keeps = std::vector<std::shared_ptr<void>>;

  // Behind what is on the stream. Returns its number.
  uint64_t add(Device& device, Stream stream, const OperationLabel& label, std::shared_ptr<void> keep);
  // Null if it was put away, or never queued.
  Event event_of(const Ticket& ticket) const;
  // Puts finished operations away, oldest first. What they held is let go of by the next caller: the watchdog must not run foreign
  // destructors, which may want Python's lock.
  void retire(Device& device, size_t at_most);
  // What finished operations have held, to be let go of without the lock.
  Keeps take_keeps() { return std::exchange(done_with_, {}); }
  bool holds_nothing() const { return operations_.empty() && done_with_.empty(); }

  bool empty() const { return operations_.empty(); }
  size_t size() const { return operations_.size(); }
  const Operation& oldest() const { return operations_.front(); }
  Clock::time_point deadline(std::chrono::milliseconds timeout) const;
  // Without the lock: blocks of memory may go.
  void clear(Device& device);

 private:
  std::deque<Operation> operations_;           // the last is number next_ - 1
  uint64_t next_ = 1;                          // number of the next operation
  Clock::time_point last_end_ = Clock::now();  // when the device was last seen to have finished one
  std::vector<Event> free_events_;
  Keeps done_with_;
};

// Shared with the watchdog, which may outlive the communicator if NCCL's abort hangs.
struct Communicator::State {
  static constexpr std::chrono::microseconds kPollInterval{200};

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
  OperationsInFlight in_flight;
  std::vector<Block> graveyard;  // freed by their owners, see reclaim()
  std::deque<Window> windows;    // NCCL writes them whenever it gets to it: they stay where they are
  bool closed = false;           // the communicator is gone, its memory may not be
  bool captured = false;         // some operation became part of a graph
  bool runs_handlers = false;    // of signals, by a thread whose call is in progress

  // Has a lock of its own: calls hold the mutex while NCCL gets under way.
  struct {
    std::mutex mutex;
    std::string reason;
    std::atomic<bool> raised{false};
  } interrupt;

  std::string who() const { return "rank " + std::to_string(config.rank) + " of " + std::to_string(config.size); }
  std::string describe(const OperationLabel& label) const {
    auto text = std::string(label.name) + " of " + std::to_string(label.numel) + " elements";
    return label.bucket < 0 ? text : text + " (bucket " + std::to_string(label.bucket) + ")";
  }
  void obey_interrupt();
  void throw_if_broken();
  void mark_broken(std::string what);
  [[noreturn]] void fail(std::string what);
  std::unique_lock<std::mutex> enter();
  void run_handlers(SignalWatch& signals, const std::string& what, std::unique_lock<std::mutex>& lock);
  void settle(int result, const std::string& what, std::unique_lock<std::mutex>* lock);
  void look();
  void watch();
  void free_block(const Block& block);
  void release(const Block& block) noexcept;
  void reclaim(std::unique_lock<std::mutex>& lock);
  void destroy_streams();
  void empty_graveyard();
};

}  // namespace torchddp::gpu
