#include "model/search.h"

#include <algorithm>
#include <random>
#include <sstream>

#include "model/memory.h"
#include "shm/limits.h"

namespace torchddp::model {
namespace {

// Depth first: repeats the last execution up to the last choice that has an alternative, and takes that.
class Exhaustive final : public Picker {
 public:
  size_t pick(const std::vector<Option>& options, uint64_t) override {
    if (depth_ == path_.size()) path_.push_back({0, options.size()});
    return path_[depth_++].picked;
  }
  // False if there is no other execution.
  bool next() {
    depth_ = 0;
    while (!path_.empty() && path_.back().picked + 1 == path_.back().count) path_.pop_back();
    if (path_.empty()) return false;
    ++path_.back().picked;
    return true;
  }
  void begin_again() {
    depth_ = 0;
    path_.clear();
  }

 private:
  struct Choice {
    size_t picked, count;
  };
  std::vector<Choice> path_;
  size_t depth_ = 0;
};

class Random final : public Picker {
 public:
  explicit Random(uint64_t seed) : source_(seed) {}
  size_t pick(const std::vector<Option>& options, uint64_t) override {
    const bool goes_on = options[0].kind == Option::kGoOn && source_() % 8 != 0;
    return goes_on ? 0 : source_() % options.size();
  }

 private:
  std::minstd_rand source_;
};

class Replay final : public Picker {
 public:
  explicit Replay(const std::string& trace) {
    std::istringstream words(trace);
    uint64_t at = 0;
    char kind = 0;
    int arg = 0;
    while (words >> at >> kind >> arg) choices_.push_back({at, {static_cast<Option::Kind>(kind), arg}});
  }
  size_t pick(const std::vector<Option>& options, uint64_t at) override {
    if (next_ == choices_.size() || choices_[next_].at != at) return 0;
    const auto found = std::ranges::find(options, choices_[next_++].option) - options.begin();
    return static_cast<size_t>(found) % options.size();
  }
  bool sees_all() const override { return true; }

 private:
  struct Choice {
    uint64_t at;
    Option option;
  };
  std::vector<Choice> choices_;
  size_t next_ = 0;
};

World world;

}  // namespace

std::string run_once(const Scenario& scenario, Picker& picker, const Budget& budget) {
  shm::kSpins = shm::kYields = scenario.looks;
  scheduler().run(picker, budget, [&] { world.prepare(scenario.size, scenario.threads, scenario.fault); });
  auto verdict = world.verdict();
  world.clear();
  return verdict;
}

namespace {

// Whether the next execution is right.
bool passes(const Scenario& scenario, Picker& picker, const Budget& budget, Result& result) {
  result.failure = run_once(scenario, picker, budget);
  ++result.executions;
  result.steps += scheduler().steps();
  if (!result.failure.empty()) result.trace = scheduler().trace();
  return result.failure.empty();
}

}  // namespace

Result explore(const Scenario& scenario, const Budget& budget, uint64_t most) {
  Result result;
  Exhaustive picker;
  while (!result.complete && result.executions < most && passes(scenario, picker, budget, result)) {
    if (learned()) {  // places that were passed over are choices now
      picker.begin_again();
    } else {
      result.complete = !picker.next();
    }
  }
  return result;
}

Result explore_random(const Scenario& scenario, uint64_t count) {
  Result result;
  Budget larger = scenario.budget;
  larger.preemptions = 1 << 20;
  larger.stale = 3;
  larger.timeouts *= 2;
  for (uint64_t seed = 1; seed <= count; ++seed) {
    Random picker(seed);
    if (!passes(scenario, picker, larger, result)) break;
  }
  return result;
}

Result replay(const Scenario& scenario, const std::string& trace) {
  Replay picker(trace);
  Result result;
  result.executions = 1;
  result.failure = run_once(scenario, picker, {1 << 20, 1 << 20, 1 << 20, 1 << 20});
  result.trace = scheduler().trace();
  return result;
}

}  // namespace torchddp::model
