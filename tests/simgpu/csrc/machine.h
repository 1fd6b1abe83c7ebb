// A device whose streams are queues. What is queued runs later, in an order that a seed picks among the legal ones: in order in a
// stream, across streams only as recorded events say.
//
// Two accesses to the same memory that nothing orders are reported, whichever order they ran in: every operation names what it
// reads and writes, and vector clocks tell what had to happen before what. All threads of the host count as one, because
// ThreadSanitizer watches those.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"
#include "memory.h"

namespace torchddp::sim {

using StreamId = int64_t;  // 1: the default stream
using EventId = int64_t;

inline constexpr std::chrono::seconds kPatience{60};  // with other ranks

// A part of an operation that runs at once, as soon as it is ready.
struct Stage {
  std::function<bool()> ready;
  std::function<void()> run;
};

inline Stage at_once(std::function<void()> run) {
  return {[] { return true; }, std::move(run)};
}

// Thread-safe.
class Machine {
 public:
  // Of this process.
  static Machine& here();

  Machine();
  Machine& operator=(Machine&&) = delete;

  // --- for tests ---

  // Starts over: the order of a run follows from the seed and from what the host calls. `late` of 100 of the values that torch's
  // operators compute are written by an operation queued for it; their memory holds NaNs before.
  void start_over(uint64_t seed, int late);
  // From now on the device goes on by itself while the host waits for other ranks.
  void expect_peers();
  // From now on what is recorded or waited for at this place (FILE:LINE) does nothing; empty: everything works.
  void leave_out(std::string place);
  // A fault that the simulated device or its NCCL stands in for; empty: none.
  void set_defect(std::string name);
  bool has_defect(const char* name);
  // Of the order in which everything ran.
  uint64_t order();
  // Where something was recorded or waited for, by kind and place, with how often.
  std::map<std::string, int64_t> places();
  // What nothing ordered, each pair once.
  std::vector<std::string> races();
  int64_t operations();

  // --- the device ---

  StreamId current_stream() const;
  StreamId exchange_stream(StreamId stream);
  StreamId make_stream();
  EventId make_event();
  void destroy_event(EventId event);
  void record(EventId event, StreamId stream, const std::source_location& where);
  void wait(StreamId stream, EventId event, const std::source_location& where);
  bool finished(EventId event);
  void synchronize();
  void synchronize(StreamId stream);
  void synchronize_event(EventId event);

  // `run` is called later, with the lock held.
  void queue(StreamId stream, std::string what, const std::vector<Range>& ranges, std::function<void()> run);
  // The same in several stages, in the order of these calls, whatever their streams. Whoever relies on that order races
  // nevertheless.
  void queue_in_line(StreamId stream, const std::string& what, const std::vector<Range>& ranges,
                     std::vector<Stage> stages);
  // Runs everything that `stream` has queued, and what that waits for; then `run`.
  void run_now(StreamId stream, std::string what, const std::vector<Range>& ranges, const std::function<void()>& run);
  // --- graphs ---

  // What is queued on `stream` from now on, and on streams that wait for it, becomes part of a graph instead of running. One
  // graph at a time. What CUDA refuses in a capture is reported with the races.
  void begin_capture(StreamId stream);
  // The number of the graph.
  size_t end_capture();
  // Queues the graph's operations behind what `stream` has queued, and what is queued there later behind them.
  void replay(size_t graph, StreamId stream);
  bool captures(StreamId stream);
  // For what run_now() has run on copies while `stream` captures: a replay does this.
  void add_to_graph(StreamId stream, std::string what, const std::vector<Range>& ranges, std::vector<Stage> stages);
  void refuse(const std::string& what);

  // --- memory ---

  // Whether to write a value late.
  bool is_late();

  void* allocate(int64_t bytes);
  void release(void* data);
  void defer_release(const void* data);
  bool owns(const void* data);

 private:
  // One record of an event. A wait refers to the last one before it.
  struct Mark {
    Clock clock;
    bool reached = false;
    bool captured = false;
  };
  struct Item {
    std::shared_ptr<Mark> mark;  // null: an operation
    bool waits = false;          // for the mark; otherwise reaches it
    std::vector<Stage> stages;
    size_t next = 0;  // stage
  };
  struct Stream {
    std::deque<Item> items;
    Clock clock;
    Actor actor = 0;  // 0: has done nothing in this run
  };
  struct Step {
    StreamId stream;
    std::shared_ptr<Mark> mark;  // as of Item
    bool waits = false;
    std::string what;
    std::vector<Range> ranges;
    std::vector<Stage> stages;
  };
  struct Graph {
    StreamId origin = 0;
    std::set<StreamId> streams;
    std::vector<Step> steps;
    std::vector<std::pair<void*, int64_t>> memory;
    std::map<StreamId, StreamId> lines;  // of replays, by stream
  };
  using Lock = std::unique_lock<std::recursive_mutex>;
  using TimePoint = std::chrono::steady_clock::time_point;

  Lock enter();
  Stream& stream(StreamId id) { return streams_.at(static_cast<size_t>(id)); }
  Actor actor_of(StreamId id);
  void note(StreamId id, const std::string& what, const std::vector<Range>& ranges);
  bool can_run(const Stream& stream) const;
  void run_first(StreamId id);
  // One operation of any stream; false if there is none.
  bool step();
  void some_steps();
  // Runs what the stream has to do first; or waits, without the lock, for other ranks that it needs.
  void advance(Lock& lock, StreamId id, TimePoint& until);
  void drain(Lock& lock, StreamId id);
  void drain_until(Lock& lock, std::shared_ptr<Mark> mark);
  bool is_left_out(const char* kind, const std::source_location& where);
  [[noreturn]] void keep_going();

  mutable std::recursive_mutex mutex_;
  std::deque<Stream> streams_;                       // by id; the first is unused
  std::map<EventId, std::shared_ptr<Mark>> events_;  // null: never recorded
  EventId last_event_ = 0;
  std::shared_ptr<Mark> line_;  // reached after the last operation that was queued in line
  std::optional<Graph> capture_;
  std::vector<Graph> graphs_;
  Clock host_;
  Actor last_actor_ = 0;
  Memory memory_;
  std::mt19937_64 random_;
  int late_ = 0;
  std::string left_out_;
  std::string defect_;
  uint64_t order_ = 0;
  std::map<std::string, int64_t> places_;
  std::set<std::string> races_;
  int64_t operations_ = 0;
  bool running_ = false;  // inside an operation
  uint64_t calls_ = 0;    // of the host
  bool has_helper_ = false;
};

}  // namespace torchddp::sim
