// Searches the executions of a scenario.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/scheduler.h"
#include "model/world.h"

namespace torchddp::model {

struct Scenario {
  std::string name;
  int size = 2;
  std::vector<Thread> threads;
  Fault fault = Fault::kNone;
  Budget budget;
  int looks = 0;  // before a rank sleeps, it looks that often again
};

struct Result {
  uint64_t executions = 0;
  uint64_t steps = 0;
  bool complete = false;  // every execution within the budget, otherwise as many as allowed
  std::string failure;
  std::string trace;  // what repeats it
};

// Runs one execution.
std::string run_once(const Scenario& scenario, Picker& picker, const Budget& budget);
// Every execution within the budget, but no more than `most`. Ends at the first failure.
Result explore(const Scenario& scenario, const Budget& budget, uint64_t most);
// With any number of preemptions.
Result explore_random(const Scenario& scenario, uint64_t count);
// The execution with this trace.
Result replay(const Scenario& scenario, const std::string& trace);

}  // namespace torchddp::model
