#include "model/scheduler.h"

#include <cxxabi.h>

#include <algorithm>
#include <array>
#include <exception>
#include <utility>

namespace torchddp::model {
namespace {

constexpr size_t kStackBytes = 128 * 1024;
// An execution that takes longer has no end.
constexpr uint64_t kMaxSteps = 20'000;
constexpr int64_t kMaxTime = 10'000'000'000;

std::array<std::array<std::byte, kStackBytes>, kMaxThreads> stacks;

// What the C++ runtime keeps for each thread, and so for all fibers of it: the exceptions being handled and thrown.
struct Exceptions {
  void* caught;
  unsigned uncaught;
};
Exceptions& exceptions() { return *reinterpret_cast<Exceptions*>(abi::__cxa_get_globals()); }

}  // namespace

Scheduler& scheduler() {
  static Scheduler only;
  return only;
}

void Scheduler::run(Picker& picker, const Budget& budget, const std::function<void()>& prepare) {
  threads_.clear();
  threads_.reserve(kMaxThreads);  // contexts can't move
  picker_ = &picker;
  left_ = budget;
  over_ = time_passes_ = false;
  dead_ = -1;
  steps_ = places_ = 0;
  now_ = 1'000'000'000;
  failure_.clear();
  trace_.clear();
  prepare();
  pass_on();
  over_ = true;
  for (int thread = 0; thread < static_cast<int>(threads_.size()); ++thread) {
    if (threads_[thread].state != State::kDone) swap(thread);
  }
}

void Scheduler::spawn(int rank, std::function<void()> body) {
  const int thread = static_cast<int>(threads_.size());
  auto& added = threads_.emplace_back();
  added.rank = rank;
  added.body = std::move(body);
  getcontext(&added.context);
  added.context.uc_stack.ss_sp = stacks.at(thread).data();
  added.context.uc_stack.ss_size = kStackBytes;
  added.context.uc_link = nullptr;
  makecontext(&added.context, reinterpret_cast<void (*)()>(&Scheduler::enter), 1, thread);
}

void Scheduler::enter(int thread) {
  auto& self = scheduler();
  try {
    if (!self.over_) self.threads_[thread].body();
  } catch (const Abandoned&) {
  } catch (const std::exception& error) {
    self.fail(std::string("an exception left a thread: ") + error.what());
  }
  self.threads_[thread].state = State::kDone;
  if (self.over_) self.swap(-1);
  self.pass_on();
}

void Scheduler::swap(int to) {
  const int from = current_;
  auto& global = exceptions();
  if (from >= 0) {
    threads_[from].caught = std::exchange(global.caught, nullptr);
    threads_[from].uncaught = std::exchange(global.uncaught, 0);
  }
  if (to >= 0) global = {threads_[to].caught, threads_[to].uncaught};
  current_ = to;
  swapcontext(from >= 0 ? &threads_[from].context : &main_, to >= 0 ? &threads_[to].context : &main_);
}

void Scheduler::abandon() {
  if (threads_[current_].unbroken == 0 && std::uncaught_exceptions() == 0) throw Abandoned();
}

Scheduler::Unbroken::Unbroken(Scheduler& scheduler) : scheduler_(scheduler), thread_(scheduler.current_) {
  ++scheduler_.threads_[thread_].unbroken;
}
Scheduler::Unbroken::~Unbroken() { --scheduler_.threads_[thread_].unbroken; }

void Scheduler::fail(const std::string& what) {
  if (!over_) failure_ = what;
  over_ = true;
}

// --- choices ----------------------------------------------------------------------------------------------------------

Option Scheduler::choose() {
  size_t picked = 0;
  if (options_.size() > 1) {
    picked = picker_->pick(options_, places_);
    if (picked > 0) {
      const auto& [kind, arg] = options_[picked];
      trace_ += (trace_.empty() ? "" : " ") + std::to_string(places_) + static_cast<char>(kind) + std::to_string(arg);
    }
  }
  ++places_;
  return options_[picked];
}

bool Scheduler::step(bool seen, bool changes) {
  if (!over_ && ++steps_ > kMaxSteps) fail("no end after " + std::to_string(kMaxSteps) + " steps");
  if (over_) {
    abandon();
    return false;
  }
  for (auto& thread : threads_) thread.yielded = false;
  options_.assign(1, {});
  if (seen || picker_->sees_all()) {
    if (left_.preemptions > 0) {
      for (int other = 0; other < static_cast<int>(threads_.size()); ++other) {
        if (other != current_ && threads_[other].state == State::kReady) options_.push_back({Option::kRun, other});
      }
    }
    add_timeouts();
    if (changes && left_.deaths > 0) options_.push_back({Option::kDie, rank()});
  }
  const auto [kind, arg] = choose();
  if (kind == Option::kGoOn) return true;
  if (kind == Option::kDie) {
    kill();
    pass_on();
  } else {
    if (kind == Option::kTimeout) time_out(arg);
    left_.preemptions -= kind == Option::kRun ? 1 : 0;
    swap(arg);
  }
  if (over_) abandon();
  return !over_;
}

int Scheduler::choose_stale(int count) {
  options_.assign(1, {});
  for (int back = 1; left_.stale > 0 && back <= count; ++back) options_.push_back({Option::kStale, back});
  const int back = choose().arg;
  left_.stale -= back > 0 ? 1 : 0;
  return back;
}

void Scheduler::yield() {
  if (current_ < 0) return;
  threads_[current_].yielded = true;
  pass_on();
  if (over_) abandon();
}

void Scheduler::sleep(const void* word, int64_t longest_ns) {
  auto& mine = threads_[current_];
  mine.state = State::kAsleep;
  mine.word = word;
  mine.deadline = now_ + longest_ns;
  pass_on(true);
  if (over_) abandon();
}

void Scheduler::wake(const void* word) {
  for (auto& thread : threads_) {
    if (thread.state == State::kAsleep && thread.word == word) thread.state = State::kReady;
  }
}

void Scheduler::wait_for(const void* word) {
  threads_[current_].state = State::kLocked;
  threads_[current_].word = word;
  pass_on();
  if (over_) abandon();
}

void Scheduler::release(const void* word) {
  for (auto& thread : threads_) {
    if (thread.state == State::kLocked && thread.word == word) thread.state = State::kReady;
  }
}

// Lets another thread run, because this one can't go on, or need not. Returns when it can.
void Scheduler::pass_on(bool may_die) {
  while (!over_) {
    options_.clear();
    add_ready(false);
    if (options_.empty()) add_ready(true);
    if (options_.empty()) {
      if (!advance_time()) break;
      continue;
    }
    add_timeouts();
    if (may_die && left_.deaths > 0) options_.push_back({Option::kDie, rank()});
    const auto [kind, arg] = choose();
    if (kind == Option::kDie) {
      kill();
      may_die = false;
      continue;
    }
    if (kind == Option::kTimeout) time_out(arg);
    if (arg != current_) swap(arg);
    return;
  }
  if (current_ >= 0) swap(-1);
}

// In turn, beginning after the running thread.
void Scheduler::add_ready(bool yielded) {
  const int count = static_cast<int>(threads_.size());
  for (int i = 1; i <= count; ++i) {
    const int thread = (current_ + i) % count;
    if (threads_[thread].state == State::kReady && threads_[thread].yielded == yielded) {
      options_.push_back({Option::kRun, thread});
    }
  }
}

void Scheduler::add_timeouts() {
  for (int thread = 0; left_.timeouts > 0 && thread < static_cast<int>(threads_.size()); ++thread) {
    if (threads_[thread].state == State::kAsleep) options_.push_back({Option::kTimeout, thread});
  }
}

void Scheduler::time_out(int thread) {
  --left_.timeouts;
  now_ = std::max(now_, threads_[thread].deadline);
  threads_[thread].state = State::kReady;
}

// No thread can run. False if there is nothing to wait for.
bool Scheduler::advance_time() {
  int64_t next = INT64_MAX;
  bool is_locked = false;
  for (const auto& thread : threads_) {
    if (thread.state == State::kAsleep) next = std::min(next, thread.deadline);
    is_locked |= thread.state == State::kLocked;
  }
  if (next == INT64_MAX) {
    if (is_locked) fail("deadlock: every thread waits for a lock");
    return false;
  }
  if (!time_passes_ && dead_ < 0) {
    fail("lost wake-up: every thread that is not done sleeps, and only a time-out would end that");
    return false;
  }
  now_ = std::max(now_, next);
  if (now_ > kMaxTime) {
    fail("a wait without end");
    return false;
  }
  for (auto& thread : threads_) {
    if (thread.state == State::kAsleep && thread.deadline <= now_) thread.state = State::kReady;
  }
  return true;
}

// The rank of the running thread, all of whose threads stop where they are.
void Scheduler::kill() {
  --left_.deaths;
  dead_ = rank();
  on_death(dead_);
  for (auto& thread : threads_) {
    if (thread.rank == dead_ && thread.state != State::kDone) thread.state = State::kDead;
  }
}

}  // namespace torchddp::model
