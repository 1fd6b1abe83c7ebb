// Runs threads one at a time, as fibers, and asks at every step that others can see which of the possible things happens next.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model/clocks.h"

namespace torchddp::model {

// What can happen next.
struct Option {
  enum Kind : char {
    kGoOn = '.',
    kRun = '>',      // thread `arg` goes on
    kStale = '~',    // a load gives the value that was replaced `arg` stores ago
    kDie = 'x',      // rank `arg` dies
    kTimeout = 't',  // the sleep of thread `arg` ends because its time is up
  };
  Kind kind = kGoOn;
  int arg = 0;
  bool operator==(const Option&) const = default;
};

// How much of what a search may choose. A switch away from a thread that could go on is a preemption; other switches are free.
struct Budget {
  int preemptions = 2;
  int stale = 1;
  int deaths = 0;
  int timeouts = 0;
};

// Chooses among options, the first of which is the default.
class Picker {
 public:
  virtual ~Picker() = default;
  // `at`: counts the places where something could be chosen.
  virtual size_t pick(const std::vector<Option>& options, uint64_t at) = 0;
  // Whether steps that no other thread can see are places too.
  virtual bool sees_all() const { return false; }
};

// Thrown through the stack of a fiber that will not go on. Not a std::exception, so that no one takes it for an error.
struct Abandoned {};

class Scheduler {
 public:
  // Runs one execution. `prepare` spawns the threads. Afterwards failure() says what went wrong, or nothing.
  void run(Picker& picker, const Budget& budget, const std::function<void()>& prepare);
  void spawn(int rank, std::function<void()> body);

  // --- for the running thread ---
  bool is_running() const { return current_ >= 0; }
  int current() const { return current_; }
  int rank() const { return threads_[current_].rank; }
  Clocks& clocks() { return threads_[current_].clocks; }
  // Called before a step. `seen`: whether other threads can tell when it happens; `changes`: whether it stores something.
  // False if the execution is over and the step must not happen.
  bool step(bool seen, bool changes);
  // Which of the last `count` + 1 values a load gives: 0 is the newest.
  int choose_stale(int count);
  void yield();
  // Until wake(word), or for so long.
  void sleep(const void* word, int64_t longest_ns);
  void wake(const void* word);
  // Until release(word).
  void wait_for(const void* word);
  void release(const void* word);
  // While it exists, the running thread can't be abandoned: in destructors.
  class Unbroken {
   public:
    explicit Unbroken(Scheduler& scheduler);
    ~Unbroken();

   private:
    Scheduler& scheduler_;
    const int thread_;
  };

  // Ends the execution.
  void fail(const std::string& what);
  const std::string& failure() const { return failure_; }
  bool is_over() const { return over_; }
  int64_t now() const { return now_; }
  // The default says that a lost wake-up has been found if the clock has to move while nothing is wrong.
  void let_time_pass() { time_passes_ = true; }
  bool is_dead(int rank) const { return dead_ == rank; }
  int dead() const { return dead_; }
  std::function<void(int)> on_death;  // called by the thread that dies

  // What was chosen other than by default, in a form that a Replay repeats.
  const std::string& trace() const { return trace_; }
  uint64_t steps() const { return steps_; }

 private:
  enum class State : uint8_t { kReady, kAsleep, kLocked, kDead, kDone };
  struct Thread {
    int rank = 0;
    State state = State::kReady;
    bool yielded = false;  // lets others run first
    int unbroken = 0;
    const void* word = nullptr;  // what it sleeps on or waits for
    int64_t deadline = 0;
    Clocks clocks;
    std::function<void()> body;
    ucontext_t context;
    void* caught = nullptr;  // the C++ runtime's, of its exceptions
    unsigned uncaught = 0;
  };

  Option choose();
  void pass_on(bool may_die = false);
  void add_ready(bool yielded);
  void add_timeouts();
  bool advance_time();
  void time_out(int thread);
  void kill();
  void swap(int to);
  void abandon();
  static void enter(int thread);

  std::vector<Thread> threads_;
  ucontext_t main_;
  int current_ = -1;
  Picker* picker_ = nullptr;
  Budget left_;
  std::vector<Option> options_;
  bool over_ = false;
  bool time_passes_ = false;
  int dead_ = -1;
  int64_t now_ = 0;
  uint64_t steps_ = 0;
  uint64_t places_ = 0;
  std::string failure_;
  std::string trace_;
};

Scheduler& scheduler();

}  // namespace torchddp::model
