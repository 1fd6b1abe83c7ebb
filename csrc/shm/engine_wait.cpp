// Waiting for operations: how long to look, when to sleep, and whether the peers still live.
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>

#include "common/deadline.h"
#include "shm/engine.h"
#include "shm/futex.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torchddp::shm {
namespace {

using std::chrono::milliseconds;

// Looking before sleeping: some 100 us where each rank has a processor, then for some 10 ms more, giving way to whoever else can run there.
// On a virtual machine a rank that comes last and has to wake the others is held up by that for 20 to 70 us, and they return 100 us
// after it if their processors are given back to them at once, which they often are not.
constexpr int kSpins = 2000;
constexpr int kYields = 16'000;
// Somebody else who ran longer than this needs the processor. So many waits then sleep soon.
constexpr std::chrono::microseconds kGaveWay{200};
constexpr int kShortWaits = 8;
constexpr int kCrowdedSpins = 20;
// A sleeper looks whether its peers still live this often. The bound that users see is two seconds.
constexpr int64_t kSleepNs = 20'000'000;
// Nobody rings when the link between hosts has something.
constexpr int64_t kOuterSleepNs = 100'000;
constexpr milliseconds kPeerCheck{10};
// How long a peer that gave up without saying because of whom is not held against it: see Engine::fail_after.
constexpr milliseconds kReasonPatience{500};

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// How often this thread has been off its processor for another one; not while the whole virtual machine was.
int64_t context_switches() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw + usage.ru_nivcsw;
}

// Lets others run on this thread's processor.
class Courtesy {
 public:
  // False if somebody needed it.
  bool give_way() {
    const auto before = switches_ >= 0 ? switches_ : context_switches();
    const auto start = Engine::Clock::now();
    sched_yield();
    const bool long_away = Engine::Clock::now() - start > kGaveWay;
    switches_ = long_away ? context_switches() : before;
    return switches_ == before;
  }

 private:
  int64_t switches_ = -1;
};

}  // namespace

// Who looks for others' work with the mutex held goes to sleep, without it, when another thread wants to come in.
std::unique_lock<std::mutex> Engine::enter() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    wanting_.fetch_add(1);
    lock.lock();
    wanting_.fetch_sub(1);
  }
  return lock;
}

bool Engine::poll(uint64_t seq) {
  const auto lock = enter();
  ensure_usable();
  advance();
  advance_outer();
  update_under_way();
  auto& op = running(seq);
  if (op.seq != seq || complete(op)) {
    return true;
  }
  if (const auto now = Clock::now(); now >= next_poll_check_) {
    next_poll_check_ = now + kPeerCheck;
    check_peers(op, Clock::time_point::max(), config_.timeout);
  }
  return false;
}

void Engine::wait(uint64_t seq, milliseconds timeout, Clock::time_point since) {
  auto lock = enter();
  auto& op = running(seq);
  if (op.seq != seq) {
    return;  // its slot serves a later one: it was complete
  }
  ensure_usable();
  wait_until(Goal::kComplete, op, patience(timeout, since), lock);
  if (op.seq == seq) {
    settle(op);
  }
  update_under_way();
}

bool Engine::wait_for(uint64_t seq, std::chrono::nanoseconds longest, bool spin) {
  auto lock = enter();
  auto& op = running(seq);
  if (op.seq != seq) {
    return true;
  }
  ensure_usable();
  const Patience patience{.until = deadline_after(longest), .limit = milliseconds(0), .fails = false, .spins = spin};
  const bool finished = wait_until(Goal::kComplete, op, patience, lock);
  update_under_way();
  return finished;
}

Engine::Patience Engine::patience(milliseconds timeout, Clock::time_point since) const {
  const auto limit = timeout.count() > 0 ? timeout : config_.timeout;
  return {.until = deadline_after(limit, since), .limit = limit};
}

// Gives `lock`, which holds the mutex, back while it sleeps, so that other threads can start operations and do their work.
bool Engine::wait_until(Goal goal, Running& op, const Patience& patience, std::unique_lock<std::mutex>& lock) {
  const auto seq = op.seq;  // while this thread sleeps, another may give the slot to a later operation
  const auto reached = [&] { return op.seq != seq || (goal == Goal::kRecyclable ? recyclable(seq) : complete(op)); };
  const auto begin = Clock::now();
  auto next_check = begin + kPeerCheck;
  SignalWatch signals(begin);
  const int spins = !patience.spins ? 0 : crowded_ ? kCrowdedSpins : kSpins;
  // The other hosts are further away than that, and to look for them takes locks that their link needs.
  const bool shortly = !patience.spins || crowded_ || config_.outer != nullptr || short_waits_ > 0;
  int looks = shortly ? spins : spins + kYields;
  short_waits_ -= short_waits_ > 0 ? 1 : 0;
  Courtesy courtesy;
  auto& mine = header(config_.rank);
  // Not short-circuited: each may have something to do.
  const auto work = [&] { return static_cast<int>(advance()) + advance_outer() > 0 || steal(op); };
  // A peer that hands out the same work over and over can't keep us here.
  const auto check = [&](Clock::time_point now) {
    check_peers(op, patience.fails ? patience.until : Clock::time_point::max(), patience.limit);
    return patience.fails || now < patience.until;
  };
  for (int idle = 0; !reached();) {
    // Before any work: what another thread gave up, with its memory, must not be written to any more.
    if (is_broken()) {
      ensure_usable();
    }
    if (work()) {
      idle = 0;
      if (const auto now = Clock::now(); now >= patience.until && !reached() && !check(now)) {
        return false;
      }
    } else if (++idle < spins) {
      pause_cpu();
    } else if (idle < looks && wanting_.load(std::memory_order_relaxed) == 0) {
      if (!courtesy.give_way()) {
        short_waits_ = kShortWaits;
        looks = spins;
      } else if (Clock::now() >= patience.until) {
        looks = spins;
      }
    } else {
      idle = 0;
      looks = spins;  // it has become a long wait
      mine.sleeping.fetch_add(1);
      const auto bell = mine.doorbell.load();
      // Whoever posted before it saw us asleep is seen here.
      if (!reached() && !work()) {
        const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(patience.until - Clock::now()).count();
        const auto longest = config_.outer != nullptr && outer_cursor_ < cursor_ ? kOuterSleepNs : kSleepNs;
        sleep(bell, std::clamp<int64_t>(left, 1, longest), lock);
      }
      mine.sleeping.fetch_sub(1);
      const auto now = Clock::now();
      if (now < next_check && now < patience.until) {
        continue;
      }
      // What another thread has seen meanwhile counts, but not against an operation that is complete.
      if (reached()) {
        return true;
      }
      ensure_usable();
      next_check = now + kPeerCheck;
      if (!check(now)) {
        return false;
      }
      if (patience.spins && signals.is_due(now)) {
        run_handlers(signals, describe(op), lock);
      }
    }
  }
  return true;
}

void Engine::sleep(uint32_t bell, int64_t longest_ns, std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  futex_wait(header(config_.rank).doorbell, bell, longest_ns);
  lock.lock();
}

// Who is called away will not come back to the operation, and the peers must not wait for that.
void Engine::run_handlers(SignalWatch& signals, const std::string& waited_for, std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  try {
    signals.look();
  } catch (...) {
    interrupt(name(config_.rank) + " gave up: the handler of a signal raised an exception in " + waited_for);
    throw;  // without the mutex, which the caller's lock does not mind
  }
  lock.lock();
}

// Throws if it is no use to wait any longer.
void Engine::check_peers(Running& waited_for, Clock::time_point deadline, milliseconds timeout) {
  // Operations are worked on in order: the first that lacks an input holds up those after it.
  auto& op = waited_for.seq >= cursor_ ? running(cursor_) : waited_for;
  std::string names;
  int first = -1;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == config_.rank) {
      continue;
    }
    if (!blocks(op, rank)) {
      check_helper(op, rank);
      continue;
    }
    first = first < 0 ? rank : first;
    names += (names.empty() ? "" : ", ") + name(rank);
    check_peer(op, rank);
  }
  if (Clock::now() >= deadline) {
    if (silent_ >= 0) {
      fail_after(op, silent_, true);
    }
    fail("timed out after " + std::to_string(timeout.count()) + " ms in " + describe(op) + ", waiting for " +
             (!names.empty()             ? names
              : config_.outer != nullptr ? "the other hosts"
                                         : "a rank that helps with it") +
             ". A peer is stopped, or does not reach this operation",
         first);
  }
}

void Engine::check_peer(const Running& op, int rank) {
  const auto& peer = header(rank);
  // In this order: a rank that finished the operation may have closed its end, and exited, since it was last looked at.
  const bool exited = config_.gone(rank);
  const auto state = static_cast<RankState>(peer.state.load());
  if (!blocks(op, rank)) {
    return;
  }
  if (state == RankState::kFailed) {
    fail_after(op, rank, false);
    return;
  }
  if (state == RankState::kClosed) {
    fail(name(rank) + " has left: it closed its end before " + describe(op) + " was complete", rank);
  }
  if (exited) {
    fail_died(op, rank);
  }
}

// A rank that the operation does not wait for. If it gave up, no other will go on for long. If it died, it may have had a chunk of
// another's shard in its hands; one that closed its end had none.
void Engine::check_helper(Running& op, int rank) {
  const bool exited = config_.gone(rank);
  const auto state = static_cast<RankState>(header(rank).state.load());
  if (state == RankState::kClosed || complete(op)) {
    return;
  }
  if (state == RankState::kFailed) {
    fail_after(op, rank, false);
    return;
  }
  if (exited && op.seq < cursor_ && is_push(op) && !is_outer(op)) {
    fail_died(op, rank);
  }
}

// Because `rank` did. One that names no culprit was probably interrupted from outside, by who is about to interrupt this rank too, with a
// reason that says more: unless it is `late`, there is some time for that first, in which whoever waits goes on.
void Engine::fail_after(const Running& op, int rank, bool late) {
  const auto culprit = header(rank).culprit.load();
  const bool known = culprit >= 0 && culprit < size() && culprit != config_.rank;
  if (!known && !late) {
    const auto now = Clock::now();
    if (silent_ < 0) {
      silent_ = rank;
      silent_since_ = now;
    }
    if (now < silent_since_ + kReasonPatience) {
      return;
    }
  }
  fail(name(rank) + " gave up" + (known ? " because of " + name(culprit) : "") + " before " + describe(op) +
           " was complete",
       known ? culprit : rank);
}

void Engine::fail_died(const Running& op, int rank) {
  fail(name(rank) + " died: its process ended, or let go of its connection, before " + describe(op) + " was complete",
       rank);
}

}  // namespace torchddp::shm
