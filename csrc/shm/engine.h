// Collective operations between processes that map each other's segments.
//
// Note [How ranks of one host work together]
// Every rank starts the same operations in the same order; the n-th is number n everywhere and uses slot n % kSlots of each
// segment. To start one is to fill in one's own slot, and to write its number there. Nobody is asked for anything: whoever sees that
// what it needs of an operation is posted does its own part of the work, in any call that passes by (start, progress, wait). There are
// three ways:
//
//   Pull     each rank reads what it needs of the others: everything but all-reduces, and small ones of few ranks.
//   Chain    small all-reduces of many ranks, summed from group to group.
//   Chunks   all-reduces of blocks in the segments: owners sum their chunks over all ranks, and write to all.
//
// The order of summation is the ranks' own, whoever sums and whenever: results are the same bit for bit in each run.
//
// Note [Trust]
// A peer may die at any instruction, or hand us garbage. Whatever is read from another segment is copied once and checked before
// it is used as an address; segments can't shrink. A dead peer is noticed by its process handle, between sleeps; a wrong one may
// spoil sums, and no more.
#pragma once

#include <atomic>
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

// Thread-safe; operations must be started in the same order everywhere all the same. All methods may throw TransportError, after
// which every other call does.
class Engine {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Engine(EngineConfig config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Board& board() const { return board_; }
  bool is_eager(const Operation& operation) const { return shm::is_eager(operation, board_); }
  // Returns its number.
  uint64_t start(const Operation& operation);
  // Does what can be done now, without waiting. Cheap when nothing is under way.
  void progress() {
    if (under_way_.load(std::memory_order_relaxed) != 0) {
      progress_slow();
    }
  }
  // `culprit`: because of whom, or -1. Always throws, and so does every later call here, and soon those of the peers. A handler of a
  // signal that ends a wait with an exception has the same effect, see Note [Signals in a wait].
  [[noreturn]] void give_up(const std::string& reason, int culprit = -1);
  // For who waits for a peer without an operation (mail.h). Works as progress(), and throws what another call would.
  void check();
  // Whether it closed its end, gave up or died: nothing more comes from there.
  bool has_left(int rank) const;
  // Throws, because `what` needs that rank; one that gave up without saying why is given a moment, see Failure::fail_after().
  void give_up_on(int rank, const std::string& what);
  // From any thread, without waiting for those in here: their calls, and all later ones, throw TransportError(reason); the peers give up
  // as above.
  void interrupt(const std::string& reason) { failure_.interrupt(reason); }
  bool poll(uint64_t seq);
  // Several threads may wait, and start other operations meanwhile. The time limit is counted from `since`.
  void wait(uint64_t seq, std::chrono::milliseconds timeout, std::optional<Clock::time_point> since = {});
  // False if the operation is not complete after `longest`; it goes on then. `spin`: somebody waits for the return: look for a while
  // before sleeping, and run the handlers of signals.
  bool wait_for(uint64_t seq, std::chrono::nanoseconds longest, bool spin);

 private:
  // How long to wait, and what to do then.
  struct Patience {
    Clock::time_point until;
    std::chrono::milliseconds limit;  // to be told in the error
    bool fails = true;                // an error, for all ranks; otherwise wait_until returns false
    bool spins = true;
  };
  using Lock = std::unique_lock<std::mutex>;

  Running& running(uint64_t seq) { return running_[seq % kSlots]; }
  void progress_slow();
  bool work();
  bool advance();
  void tell_done(const Running& op);
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
  std::mutex mutex_;
  std::atomic<int> wanting_{0};  // threads that wait for it
  int asleep_ = 0;               // threads that have given it back
  const bool crowded_;           // fewer processors than ranks: to spin would keep a peer from its work
  int short_waits_ = 0;          // so many more waits sleep soon: somebody else needs the processor
  Clock::time_point next_poll_check_;

  std::deque<Running> running_;  // by slot
  uint64_t next_ = 0;            // number of the next operation
  uint64_t cursor_ = 0;          // first whose own work is not done
  uint64_t outer_cursor_ = 0;    // first whose shard is not final
  uint64_t oldest_ = 0;          // first that is not known to be complete
  std::atomic<uint64_t> under_way_{0};
};

}  // namespace torchddp::shm
