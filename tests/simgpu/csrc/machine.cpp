#include "machine.h"

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

namespace torchddp::sim {
namespace {

thread_local StreamId current = 1;
thread_local bool drives = false;  // whether this thread has queued anything: a watchdog has not

// Frees the host of waiting for a peer that waits for this host elsewhere, in a barrier: see keep_going().
constexpr std::chrono::milliseconds kIdle{200};

std::string place_of(const char* kind, const std::source_location& where) {
  const char* const slash = std::strrchr(where.file_name(), '/');
  return std::string(kind) + " at " + (slash == nullptr ? where.file_name() : slash + 1) + ":" +
         std::to_string(where.line());
}

}  // namespace

// Never destroyed: threads of torch may still free tensors at exit.
Machine& Machine::here() {
  static auto* machine = new Machine();
  return *machine;
}

Machine::Machine()
    : streams_(2), memory_([this](const std::string& earlier, const std::string& later) {
        races_.insert("nothing orders " + earlier + " before " + later);
      }) {}

Machine::Lock Machine::enter() {
  Lock lock(mutex_);
  ++calls_;
  return lock;
}

// A peer may wait in NCCL for an operation that is still queued here, while this host waits for that peer's host. Real devices go
// on by themselves. So does this one, but only once the host has called nothing for a while: until then the order follows from
// the seed.
void Machine::keep_going() {
  uint64_t seen = 0;
  while (true) {
    std::this_thread::sleep_for(kIdle);
    const Lock lock(mutex_);
    if (seen == calls_) {
      while (step()) {
      }
    }
    seen = calls_;
  }
}

void Machine::expect_peers() {
  const auto lock = enter();
  if (!std::exchange(has_helper_, true)) std::thread([this] { keep_going(); }).detach();
}

void Machine::start_over(uint64_t seed, int late) {
  synchronize();
  const auto lock = enter();
  // The host has waited for all that came before.
  for (auto& stream : streams_) stream = {};
  for (auto& [_, mark] : events_) mark = nullptr;
  host_ = {};
  last_actor_ = 0;
  memory_.forget_accesses();
  random_.seed(seed);
  late_ = late;
  races_.clear();
  places_.clear();
  operations_ = 0;
  order_ = 0;
}

void Machine::leave_out(std::string place) {
  const auto lock = enter();
  left_out_ = std::move(place);
}

void Machine::set_defect(std::string name) {
  const auto lock = enter();
  defect_ = std::move(name);
}

bool Machine::has_defect(const char* name) {
  const auto lock = enter();
  return defect_ == name;
}

uint64_t Machine::order() {
  const auto lock = enter();
  return order_;
}

std::map<std::string, int64_t> Machine::places() {
  const auto lock = enter();
  return places_;
}

std::vector<std::string> Machine::races() {
  const auto lock = enter();
  return {races_.begin(), races_.end()};
}

int64_t Machine::operations() {
  const auto lock = enter();
  return operations_;
}

StreamId Machine::current_stream() const { return current; }

StreamId Machine::exchange_stream(StreamId stream) { return std::exchange(current, stream); }

StreamId Machine::make_stream() {
  const auto lock = enter();
  streams_.emplace_back();
  return static_cast<StreamId>(streams_.size()) - 1;
}

EventId Machine::make_event() {
  const auto lock = enter();
  events_[++last_event_] = nullptr;
  return last_event_;
}

// What is queued goes on, as in CUDA.
void Machine::destroy_event(EventId event) {
  const auto lock = enter();
  events_.erase(event);
}

bool Machine::is_left_out(const char* kind, const std::source_location& where) {
  const auto place = place_of(kind, where);
  ++places_[place];
  return place == left_out_;
}

void Machine::record(EventId event, StreamId at, const std::source_location& where) {
  const auto lock = enter();
  if (is_left_out("record", where)) return;
  auto& to = stream(defect_ == "records elsewhere" ? 1 : at);
  to.clock.join(host_);
  auto mark = std::make_shared<Mark>(to.clock);
  events_.at(event) = mark;
  if (captures(at)) {
    mark->captured = true;
    capture_->steps.push_back({at, std::move(mark), false, {}, {}, {}});
    return;
  }
  to.items.push_back({std::move(mark), false, {}});
  some_steps();
}

void Machine::wait(StreamId at, EventId event, const std::source_location& where) {
  const auto lock = enter();
  if (is_left_out("wait", where)) return;
  const auto& mark = events_.at(event);
  if (mark == nullptr) return;
  if (mark->captured && !capture_) {
    refuse("a wait for an event of a graph, outside of the graph");
    return;
  }
  auto& to = stream(at);
  to.clock.join(mark->clock);
  if (mark->captured) {
    if (at == 1) refuse("the default stream");
    capture_->streams.insert(at);
    capture_->steps.push_back({at, mark, true, {}, {}, {}});
    return;
  }
  if (captures(at)) refuse("a wait for work outside of the graph");
  to.items.push_back({mark, true, {}});
  some_steps();
}

bool Machine::finished(EventId event) {
  if (!drives) return false;  // when a watchdog asks must not make a difference
  const auto lock = enter();
  some_steps();
  const auto& mark = events_.at(event);
  if (mark == nullptr) return true;
  if (mark->captured) refuse("a query of an event of the graph");
  if (!mark->reached) return false;
  host_.join(mark->clock);
  return true;
}

void Machine::synchronize() {
  auto lock = enter();
  if (capture_) refuse("waiting for the device");
  for (size_t id = 1; id < streams_.size(); ++id) drain(lock, static_cast<StreamId>(id));
  for (const auto& stream : streams_) host_.join(stream.clock);
  memory_.device_is_idle();
}

void Machine::synchronize(StreamId id) {
  auto lock = enter();
  if (captures(id)) refuse("waiting for a stream of the graph");
  drain(lock, id);
  host_.join(stream(id).clock);
}

void Machine::synchronize_event(EventId event) {
  auto lock = enter();
  const auto mark = events_.at(event);
  if (mark == nullptr) return;
  if (mark->captured) {
    refuse("waiting for an event of the graph");
    return;
  }
  drain_until(lock, mark);
  host_.join(mark->clock);
}

Actor Machine::actor_of(StreamId id) {
  auto& actor = stream(id).actor;
  if (actor == 0) actor = ++last_actor_;
  return actor;
}

void Machine::note(StreamId id, const std::string& what, const std::vector<Range>& ranges) {
  drives = true;
  auto& clock = stream(id).clock;
  clock.join(host_);
  const auto at = clock.tick(actor_of(id));
  const auto named = what + " on stream " + std::to_string(id);
  for (const auto& range : ranges) memory_.use(range, clock, at, named);
  ++operations_;
}

void Machine::queue(StreamId id, std::string what, const std::vector<Range>& ranges, std::function<void()> run) {
  const auto lock = enter();
  if (captures(id)) {
    add_to_graph(id, std::move(what), ranges, {at_once(std::move(run))});
    return;
  }
  note(id, what, ranges);
  stream(id).items.push_back({nullptr, false, {at_once(std::move(run))}});
  some_steps();
}

void Machine::queue_in_line(StreamId id, const std::string& what, const std::vector<Range>& ranges,
                            std::vector<Stage> stages) {
  const auto lock = enter();
  if (captures(id)) {
    add_to_graph(id, what, ranges, std::move(stages));
    return;
  }
  note(id, what, ranges);
  auto& items = stream(id).items;
  if (line_ != nullptr) items.push_back({line_, true, {}});
  line_ = std::make_shared<Mark>();
  items.push_back({nullptr, false, std::move(stages)});
  items.push_back({line_, false, {}});
  some_steps();
}

void Machine::run_now(StreamId id, std::string what, const std::vector<Range>& ranges,
                      const std::function<void()>& run) {
  auto lock = enter();
  if (!captures(id)) {
    note(id, what, ranges);
    drain(lock, id);
  }
  run();
}

void Machine::begin_capture(StreamId id) {
  const auto lock = enter();
  if (id == 1) refuse("the default stream");
  capture_ = Graph{.origin = id, .streams = {id}, .steps = {}, .memory = {}, .lines = {}};
}

size_t Machine::end_capture() {
  const auto lock = enter();
  const auto& joined = stream(capture_->origin).clock;
  for (const auto id : capture_->streams) {
    const auto actor = actor_of(id);
    if (!joined.knows({actor, stream(id).clock[actor]})) refuse("a fork that does not join");
  }
  for (const auto& [data, bytes] : capture_->memory) std::memset(data, 0xff, static_cast<size_t>(bytes));
  graphs_.push_back(std::move(*capture_));
  capture_.reset();
  return graphs_.size() - 1;
}

void Machine::replay(size_t number, StreamId at) {
  const auto lock = enter();
  auto& graph = graphs_.at(number);
  graph.lines[graph.origin] = at;
  std::map<const Mark*, std::shared_ptr<Mark>> marks;
  for (const auto& step : graph.steps) {
    auto& line = graph.lines[step.stream];
    if (line == 0) line = make_stream();
    auto& to = stream(line);
    if (step.mark == nullptr) {
      note(line, step.what, step.ranges);
      to.items.push_back({nullptr, false, step.stages});
      continue;
    }
    auto& mark = marks[step.mark.get()];
    if (step.waits) {
      to.clock.join(mark->clock);
    } else {
      mark = std::make_shared<Mark>(to.clock);
    }
    to.items.push_back({mark, step.waits, {}});
  }
  some_steps();
}

bool Machine::captures(StreamId id) {
  const auto lock = enter();
  return capture_ && capture_->streams.contains(id);
}

void Machine::add_to_graph(StreamId id, std::string what, const std::vector<Range>& ranges, std::vector<Stage> stages) {
  const auto lock = enter();
  what += " of a graph";
  note(id, what, ranges);
  capture_->steps.push_back({id, nullptr, false, std::move(what), ranges, std::move(stages)});
}

void Machine::refuse(const std::string& what) {
  const auto lock = enter();
  races_.insert("a capture does not allow " + what);
}

bool Machine::is_late() {
  const auto lock = enter();
  return !captures(current) && static_cast<int>(random_() % 100) < late_;
}

bool Machine::can_run(const Stream& stream) const {
  if (stream.items.empty()) return false;
  const auto& first = stream.items.front();
  if (first.mark != nullptr) return !first.waits || first.mark->reached;
  return first.stages[first.next].ready();
}

void Machine::run_first(StreamId id) {
  auto& items = stream(id).items;
  order_ = order_ * 1000003 + static_cast<uint64_t>(id);
  auto item = std::move(items.front());
  items.pop_front();
  if (item.mark != nullptr) {
    item.mark->reached = true;
    return;
  }
  const auto now = item.next++;
  const auto was_running = std::exchange(running_, true);
  item.stages[now].run();
  running_ = was_running;
  if (item.next < item.stages.size()) items.push_front(std::move(item));
}

bool Machine::step() {
  std::vector<StreamId> ready;
  for (size_t id = 1; id < streams_.size(); ++id) {
    if (can_run(streams_[id])) ready.push_back(static_cast<StreamId>(id));
  }
  if (ready.empty()) return false;
  run_first(ready[random_() % ready.size()]);
  return true;
}

// How far the device is behind the host: often far, at times hardly.
void Machine::some_steps() {
  if (running_) return;
  const auto drawn = random_() % 16;
  for (uint64_t steps = drawn < 10 ? 0 : drawn < 15 ? drawn - 9 : 64; steps > 0 && step(); --steps) {
  }
}

void Machine::advance(Lock& lock, StreamId id, TimePoint& until) {
  if (can_run(stream(id))) {
    run_first(id);
    until = std::chrono::steady_clock::now() + kPatience;
  } else if (const auto& first = stream(id).items.front(); first.waits) {
    drain_until(lock, first.mark);
  } else {
    if (std::chrono::steady_clock::now() > until) throw std::runtime_error("a rank does not come");
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    lock.lock();
  }
}

void Machine::drain(Lock& lock, StreamId id) {
  auto until = std::chrono::steady_clock::now() + kPatience;
  while (!stream(id).items.empty()) advance(lock, id, until);
}

void Machine::drain_until(Lock& lock, std::shared_ptr<Mark> mark) {
  auto until = std::chrono::steady_clock::now() + kPatience;
  const auto reaches = [&](const Item& item) { return item.mark == mark && !item.waits; };
  while (!mark->reached) {
    const auto found = std::ranges::find_if(
        streams_, [&](const Stream& stream) { return std::ranges::any_of(stream.items, reaches); });
    if (found == streams_.end()) throw std::logic_error("a stream waits for an event that no stream will reach");
    advance(lock, found - streams_.begin(), until);
  }
}

void* Machine::allocate(int64_t bytes) {
  const auto lock = enter();
  if (captures(current)) {
    auto* const data = memory_.allocate_for_ever(bytes);
    capture_->memory.emplace_back(data, bytes);
    return data;
  }
  auto* const data = memory_.allocate(bytes, static_cast<Actor>(current));
  const auto size = memory_.size_of(data);
  queue(current, "new memory", {{data, size, true}}, [=] { std::memset(data, 0xff, static_cast<size_t>(size)); });
  return data;
}

void Machine::release(void* data) {
  const auto lock = enter();
  memory_.release(data);
}

void Machine::defer_release(const void* data) {
  const auto lock = enter();
  memory_.defer(data);
}

bool Machine::owns(const void* data) {
  const auto lock = enter();
  return memory_.size_of(data) > 0;
}

}  // namespace torchddp::sim
