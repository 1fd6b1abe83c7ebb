// What a communicator's calls and its watchdog share. Not for use outside of gpu/.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/signals.h"
#include "gpu/communicator.h"

namespace torchddp::gpu {

// Shared with the watchdog, which may outlive the communicator if NCCL's abort hangs.
struct Communicator::State {
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kPollInterval{200};

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

  // Of Communicator::interrupt: calls hold the mutex while NCCL gets under way.
  std::mutex interrupt_mutex;
  std::string interrupt_reason;
  std::atomic<bool> interrupted{false};

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
  Event take_event();
  void retire(int at_most);
  void look();
  std::string during() const { return in_flight.empty() ? "" : ", during " + describe(in_flight.front().label); }
  void watch();
  void free_block(const Block& block);
  void release(const Block& block) noexcept;
  void reclaim(std::unique_lock<std::mutex>& lock);
  void destroy_streams();
  void empty_graveyard();
};

}  // namespace torchddp::gpu
