#include "shm/engine.h"

#include <sys/resource.h>

#include <algorithm>
#include <utility>

#include "common/deadline.h"

namespace torchddp::shm {
namespace {

using std::chrono::milliseconds;

// If yielding took longer than this, another thread needs the processor, and the next few waits sleep early.
constexpr std::chrono::microseconds kGaveWay{200};
constexpr int kShortWaits = 8;
// How often a sleeping rank checks that its peers are alive. The bound visible to users is two seconds.
constexpr int64_t kSleepNs = 20'000'000;
constexpr milliseconds kPeerCheck{10};
// Nothing rings the doorbell when the link between hosts makes progress.
constexpr int64_t kOuterSleepNs = 100'000;

// How often this thread lost its processor to another one; does not count times when the whole virtual machine was stopped.
int64_t context_switches() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw + usage.ru_nivcsw;
}

// Yields this thread's processor to others.
class Courtesy {
 public:
  // False if another thread needed it.
  bool give_way() {
    const auto before = switches_ >= 0 ? switches_ : context_switches();
    const auto start = Clock::now();
    yield_cpu();
    const bool long_away = Clock::now() - start > kGaveWay;
    switches_ = long_away ? context_switches() : before;
    return switches_ == before;
  }

 private:
  int64_t switches_ = -1;
};

}  // namespace

Engine::Engine(EngineConfig config)
    : config_(std::move(config)), board_(config_), failure_(board_, config_.reason_patience), done_(board_),
      crowded_(board_.is_crowded()) {
  if (board_.rank() < 0 || board_.rank() >= board_.size() || board_.size() > kMaxRanks) {
    throw InternalError("a shared-memory engine for rank " + std::to_string(board_.rank()) + " of " +
                        std::to_string(board_.size()));
  }
  for (uint64_t i = 0; i < kSlots; ++i) running_.emplace_back(config_, board_, failure_, done_);
}

Engine::~Engine() {
  if (failure_.is_forked()) return;  // a forked child drops its copy; the rank lives on in the parent
  auto open = static_cast<uint32_t>(RankState::kOpen);
  board_.own_header().state.compare_exchange_strong(open, static_cast<uint32_t>(RankState::kClosed));
  board_.ring();
}

// A thread that checks for others' work while holding the mutex sleeps, without it, when another thread wants to enter.
Engine::Lock Engine::enter() {
  if (failure_.is_forked()) throw TransportError(kForkedAway);  // the mutex may be held
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    wanting_.fetch_add(1);
    lock.lock();
    wanting_.fetch_sub(1);
  }
  return lock;
}

uint64_t Engine::start(const Operation& operation) {
  auto lock = enter();
  failure_.check();
  if (operation.numel < 0 || operation.root < 0 || operation.root >= board_.size()) {
    throw InternalError(std::string(kind_name(operation.kind)) + " of " + std::to_string(operation.numel) +
                        " elements with root " + std::to_string(operation.root));
  }
  wait_for_slot(lock);
  const auto seq = next_;
  running(seq).start(operation, seq);
  ++next_;
  under_way_.store(next_ - oldest_, std::memory_order_relaxed);
  // Wakes the others after this rank's own work, because waking takes longer than most of that work. If every rank has much to
  // do, they can do theirs meanwhile, so it wakes them first.
  const auto wake = [&] {
    if (board_.has_sleepers() && running(seq).is_awaited()) board_.ring();
  };
  if (running(seq).is_shared_work()) wake();
  advance();
  wake();
  update_under_way();
  return seq;
}

// Until the slot of the next operation is free.
void Engine::wait_for_slot(Lock& lock) {
  while (next_ >= kSlots) {
    const auto seq = next_;
    auto& op = running(seq);
    if (!op.is_recyclable()) {
      wait_until(Goal::kRecyclable, op, patience(milliseconds(0), Clock::now()), lock);
    }
    if (seq == next_) {  // no other thread has taken it meanwhile
      op.settle();
      break;
    }
  }
}

void Engine::progress_slow() {
  const Lock lock(mutex_, std::try_to_lock);
  if (lock && !failure_.has_failed() && !failure_.is_forked()) {
    work();
    update_under_way();
  }
}

bool Engine::work() {
  const bool moved = advance();
  return advance_outer() || moved;
}

bool Engine::advance() {
  bool moved = false;
  while (cursor_ < next_ && running(cursor_).work()) {
    const auto& worked = running(cursor_);
    board_.own_header().done.store(++cursor_);
    announce_done(worked);
    moved = true;
  }
  return moved;
}

// For ranks that may be waiting for nothing else.
void Engine::announce_done(const Running& op) {
  if (!board_.has_sleepers()) return;
  const auto is_done = [&](int rank) { return done_.has(rank, cursor_ - 1); };
  if (asleep_ > 0 || !op.is_all_reduce() || board_.all_of_ranks(is_done)) board_.ring();
}

bool Engine::advance_outer() {
  bool moved = false;
  while (awaits_outer() && running(outer_cursor_).finish_outer()) {
    board_.own_header().outer.store(++outer_cursor_);
    board_.ring();
    moved = true;
  }
  return moved;
}

void Engine::update_under_way() {
  while (oldest_ < next_ && running(oldest_).is_complete()) ++oldest_;
  under_way_.store(next_ - oldest_, std::memory_order_relaxed);
}

void Engine::give_up(const std::string& reason, int culprit) {
  const auto lock = enter();
  failure_.fail(reason, culprit);
}

bool Engine::is_open() {
  const auto lock = enter();
  return !failure_.has_failed() &&
         board_.all_of_ranks([&](int rank) { return board_.state(rank) == RankState::kOpen; });
}

bool Engine::poll(uint64_t seq) {
  const auto lock = enter();
  failure_.check();
  work();
  update_under_way();
  auto& op = running(seq);
  if (op.seq() != seq || op.is_complete()) return true;
  if (const auto now = Clock::now(); now >= next_poll_check_) {
    next_poll_check_ = now + kPeerCheck;
    check_peers(op, Clock::time_point::max(), config_.timeout);
  }
  return false;
}

void Engine::wait(uint64_t seq, milliseconds timeout, std::optional<Clock::time_point> since) {
  finish(seq, [&] { return patience(timeout, since.value_or(Clock::now())); });
}

bool Engine::wait_for(uint64_t seq, std::chrono::nanoseconds longest, bool spin) {
  return finish(seq, [&]() -> Patience {
    return {.until = deadline_after(longest, Clock::now()), .limit = milliseconds(0), .fails = false, .spins = spin};
  });
}

// `patience` reads the clock, so it is only called if there is something to wait for.
template <class MakePatience>
bool Engine::finish(uint64_t seq, MakePatience&& patience) {
  auto lock = enter();
  auto& op = running(seq);
  if (op.seq() != seq) return true;  // its slot serves a later operation, so it was complete
  failure_.check();
  const bool finished = op.is_complete() || wait_until(Goal::kComplete, op, patience(), lock);
  if (finished && op.seq() == seq) op.settle();
  update_under_way();
  return finished;
}

Engine::Patience Engine::patience(milliseconds timeout, Clock::time_point since) const {
  const auto limit = timeout.count() > 0 ? timeout : config_.timeout;
  return {.until = deadline_after(limit, since), .limit = limit};
}

// Releases `lock`, which holds the mutex, while sleeping, so that other threads can start operations and do their work.
bool Engine::wait_until(Goal goal, Running& op, const Patience& patience, Lock& lock) {
  const auto seq = op.seq();  // while this thread sleeps, another may give the slot to a later operation
  const auto reached = [&] {
    return op.seq() != seq || (goal == Goal::kRecyclable ? op.is_recyclable() : op.is_complete());
  };
  const auto begin = Clock::now();
  auto next_check = begin + kPeerCheck;
  SignalWatch signals(begin);
  const int spins = !patience.spins ? 0 : crowded_ ? kCrowdedSpins : kSpins;
  // Other hosts are further away than that, and checking on them takes locks that their link needs.
  const bool shortly = !patience.spins || board_.spans() || short_waits_ > 0;
  int looks = shortly ? spins : spins + (crowded_ ? kCrowdedYields : kYields);
  short_waits_ -= short_waits_ > 0 ? 1 : 0;
  Courtesy courtesy;
  const auto work_or_help = [&](int idle) { return work() || ((crowded_ || idle >= kHelpAfter) && op.help()); };
  // A peer that hands out the same work over and over must not keep us here.
  const auto check = [&](Clock::time_point now) {
    check_peers(op, patience.fails ? patience.until : Clock::time_point::max(), patience.limit);
    return patience.fails || now < patience.until;
  };
  for (int idle = 0; !reached();) {
    // Before any work: memory that another thread gave up must not be written to.
    if (failure_.has_failed()) failure_.check();
    if (work_or_help(idle)) {
      idle = 0;
      if (const auto now = Clock::now(); now >= patience.until && !reached() && !check(now)) return false;
    } else if (++idle < spins) {
      pause_cpu();
    } else if (idle < looks && wanting_.load(std::memory_order_relaxed) == 0) {
      if (crowded_) {
        yield_cpu();
      } else if (!courtesy.give_way()) {
        short_waits_ = kShortWaits;
        looks = spins;
      } else if (Clock::now() >= patience.until) {
        looks = spins;
      }
    } else {
      idle = 0;
      looks = spins;  // it has become a long wait
      ++asleep_;
      const auto bell = board_.begin_sleep();
      // A peer that posted before it could see us asleep is noticed here.
      if (!reached() && !work_or_help(std::max(spins, kHelpAfter))) {
        const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(patience.until - Clock::now()).count();
        const auto longest = awaits_outer() ? kOuterSleepNs : kSleepNs;
        lock.unlock();
        board_.sleep(bell, std::clamp<int64_t>(left, 1, longest));
        lock.lock();
      }
      board_.end_sleep();
      --asleep_;
      const auto now = Clock::now();
      if (now < next_check && now < patience.until) continue;
      // What another thread has seen counts, but not against an operation that is complete.
      if (reached()) return true;
      failure_.check();
      next_check = now + kPeerCheck;
      if (!check(now)) return false;
      if (patience.spins && signals.is_due(now)) run_handlers(signals, op, lock);
    }
  }
  return true;
}

// If a handler raises, this thread will not return to the operation, and the peers must not wait for it.
void Engine::run_handlers(SignalWatch& signals, const Running& waited_for, Lock& lock) {
  const auto what = waited_for.describe();
  lock.unlock();
  try {
    signals.look();
  } catch (...) {
    interrupt(board_.name(board_.rank()) + " gave up: a signal handler raised an exception in " + what);
    lock.lock();  // no thread works on the operation any more, so its memory may go
    throw;
  }
  lock.lock();
}

// Throws if waiting is pointless.
void Engine::check_peers(Running& waited_for, Clock::time_point deadline, milliseconds timeout) {
  // Operations are done in order: the first one that lacks an input holds up those after it.
  auto& op = waited_for.is_worked() ? waited_for : running(cursor_);
  std::string names;
  int first = -1;
  for (int peer = 0; peer < board_.size(); ++peer) {
    if (peer != board_.rank() && check_peer(op, peer)) {
      first = first < 0 ? peer : first;
      names += (names.empty() ? "" : ", ") + board_.name(peer);
    }
  }
  if (Clock::now() >= deadline) {
    if (failure_.silent() >= 0) failure_.fail_after(op.describe(), failure_.silent(), true);
    const auto* others = board_.spans() ? "the other hosts" : "a rank that helps with it";
    failure_.fail("timed out after " + std::to_string(timeout.count()) + " ms in " + op.describe() + ", waiting for " +
                      (names.empty() ? others : names) + " (stopped, slow, or elsewhere in the program)." + kIfUneven,
                  first);
  }
}

// Whether the operation is waiting for this peer. Even if it isn't: if the peer gave up, no other will go on for long; if it
// died, it may have been working on a chunk of another's shard. One that closed its end had none.
bool Engine::check_peer(Running& op, int peer) {
  // In this order: a rank that finished the operation may have closed its end and exited since it was last checked.
  const bool exited = config_.gone(peer);
  const auto state = board_.state(peer);
  const bool waits = op.waits_for(peer);
  if (!waits && (state == RankState::kClosed || op.is_complete())) return false;
  if (state != RankState::kOpen || (exited && (waits || op.has_helpers()))) blame(peer, state, op.describe());
  return waits;
}

// Reports a rank that has left, with `state` as its last state.
void Engine::blame(int peer, RankState state, const std::string& what) {
  if (state == RankState::kFailed) {
    failure_.fail_after(what, peer);
  } else if (state == RankState::kClosed) {
    failure_.fail(
        board_.name(peer) + " has left before " + what +
            " was complete. It raised an error (see its log), or its loop ended early: it got fewer batches, or "
            "skipped a backward." +
            kIfUneven,
        peer);
  } else {
    failure_.fail(board_.name(peer) + " died: its process ended or dropped its connection before " + what +
                      " was complete. Look at its log; if no error is there, it was killed, often for lack of memory.",
                  peer);
  }
}

}  // namespace torchddp::shm
