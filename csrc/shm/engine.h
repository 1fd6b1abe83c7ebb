// Collective operations between processes that map each other's segments.
//
// Note [How ranks of one host work together]
// Every rank starts the same operations in the same order; the n-th has number n everywhere and uses slot n % kSlots of each
// segment. Starting an operation means filling in one's own slot and writing the number there. Any rank that is inside a
// library call (start, progress, wait) and finds that the inputs it needs are posted does its own part of the work; there is no
// helper thread and no request to another rank. There are two ways:
//
//   Pull     each rank reads what it needs from the others: everything but large all-reduces.
//   Chunks   large all-reduces of blocks in the segments: owners sum their chunks over all ranks and write the result to all.
//
// Sums are formed in rank order, whichever rank forms them and whenever, so every run gives the same bits.
//
// Note [Trust]
// A peer may die at any instruction, or write garbage. Anything read from another segment is copied once and checked before it
// is used as an address, and segments can't shrink. A dead peer is noticed by its process handle, between sleeps. A misbehaving
// one may corrupt sums, but nothing else.
#pragma once

#include <chrono>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include "common/signals.h"
#include "shm/board.h"
#include "shm/failure.h"
#include "shm/operation.h"
#include "shm/running.h"

namespace torchddp::shm {

// Thread-safe, but operations must be started in the same order on every rank. All methods may throw TransportError; after that
// every other call does too.
class Engine {
 public:
  using Clock = shm::Clock;

  explicit Engine(EngineConfig config);
  ~Engine();
  Engine& operator=(Engine&&) = delete;

  const Board& board() const { return board_; }
  bool is_eager(const Operation& operation) const { return shm::is_eager(operation, board_); }
  // Returns its number.
  uint64_t start(const Operation& operation);
  // Does what can be done now, without waiting. Cheap when nothing is in flight.
  void progress() {
    if (under_way_.load(std::memory_order_relaxed) != 0) progress_slow();
  }
  // `culprit`: the rank responsible, or -1. Always throws, as does every later call here and, soon, those of the peers. A
  // signal handler that ends a wait with an exception has the same effect, see Note [Signals in a wait].
  [[noreturn]] void give_up(const std::string& reason, int culprit = -1);
  // Thread-safe; does not wait for threads inside the engine. Their calls, and all later ones, throw TransportError(reason);
  // the peers give up as above.
  void interrupt(const std::string& reason) { failure_.interrupt(reason); }
  // Whether it can go on, as far as can be seen.
  bool is_open();
  bool poll(uint64_t seq);
  // Several threads may wait, and start other operations meanwhile. The time limit counts from `since`.
  void wait(uint64_t seq, std::chrono::milliseconds timeout, std::optional<Clock::time_point> since = {});
  // False if the operation is not complete after `longest`; it then continues. `spin`: the caller is blocked on it, so spin
  // before sleeping, and run signal handlers.
  bool wait_for(uint64_t seq, std::chrono::nanoseconds longest, bool spin);

 private:
  // How long to wait, and what happens then.
  struct Patience {
    Clock::time_point until;
    std::chrono::milliseconds limit;  // reported in the error
    bool fails = true;                // raise an error, for all ranks; otherwise wait_until returns false
    bool spins = true;
  };
  using Lock = std::unique_lock<Mutex>;

  Running& running(uint64_t seq) { return running_[seq % kSlots]; }
  void progress_slow();
  bool work();
  bool advance();
  void announce_done(const Running& op);
  bool advance_outer();
  bool awaits_outer() const { return board_.spans() && outer_cursor_ < cursor_; }
  void update_under_way();

  Lock enter();
  void wait_for_slot(Lock& lock);
  Patience patience(std::chrono::milliseconds timeout, Clock::time_point since) const;
  template <class MakePatience>
  bool finish(uint64_t seq, MakePatience&& patience);
  enum class Goal { kComplete, kRecyclable };
  bool wait_until(Goal goal, Running& op, const Patience& patience, Lock& lock);
  void run_handlers(SignalWatch& signals, const Running& waited_for, Lock& lock);
  void check_peers(Running& waited_for, Clock::time_point deadline, std::chrono::milliseconds timeout);
  bool check_peer(Running& op, int rank);
  void blame(int rank, RankState state, const std::string& what);

  const EngineConfig config_;
  const Board board_;
  Failure failure_;
  Done done_;
  Mutex mutex_;
  Atomic<int> wanting_{0};  // threads waiting for the mutex
  int asleep_ = 0;          // threads that have released it to sleep
  const bool crowded_;      // fewer processors than ranks, so spinning would keep a peer from working
  int short_waits_ = 0;     // how many more waits sleep early because another thread needs the processor
  Clock::time_point next_poll_check_;

  std::deque<Running> running_;  // by slot
  uint64_t next_ = 0;            // number of the next operation
  uint64_t cursor_ = 0;          // first one whose own work is not done
  uint64_t outer_cursor_ = 0;    // first one whose shard is not final
  uint64_t oldest_ = 0;          // first one that is not known to be complete
  Atomic<uint64_t> under_way_{0};
};

}  // namespace torchddp::shm
