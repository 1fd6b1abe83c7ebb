// Searches the executions of the shared-memory protocol: docs/shm_model.md.
#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "model/memory.h"
#include "model/scenarios.h"

namespace torchddp::model {
namespace {

constexpr const char* kUsage =
    "torchddp_shm_model [MOST [NAME]]    searches up to MOST executions of each scenario whose name contains NAME\n"
    "torchddp_shm_model replay NAME TRACE    repeats an execution\n"
    "torchddp_shm_model weaken [MOST [PLACE]]    searches with each memory order weakened in turn\n";

constexpr uint64_t kMost = 2000;
constexpr uint64_t kRandom = 200;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

constexpr int kAny = INT_MAX;
// One more preemption is allowed each time, as long as `most` executions suffice. `preemptions`: up to how many every execution
// was searched, or kAny.
Result deepen(const Scenario& scenario, uint64_t most, int& preemptions) {
  preemptions = -1;
  auto total = explore_random(scenario, std::min(most, kRandom));
  for (uint64_t before = 0; total.failure.empty() && total.executions < most; ++preemptions) {
    auto budget = scenario.budget;
    budget.preemptions = preemptions + 1;
    auto result = explore(scenario, budget, most - total.executions);
    total.executions += result.executions;
    total.steps += result.steps;
    total.failure = std::move(result.failure);
    total.trace = std::move(result.trace);
    if (!result.complete) break;
    if (result.executions == before) {  // no execution has more
      preemptions = kAny;
      break;
    }
    before = result.executions;
  }
  return total;
}

int search(uint64_t most, const std::string& part) {
  uint64_t executions = 0, steps = 0;
  int failed = 0, count = 0;
  for (const auto& scenario : scenarios()) {
    if (!contains(scenario.name, part)) continue;
    int preemptions = 0;
    const auto start = std::chrono::steady_clock::now();
    const auto result = deepen(scenario, most, preemptions);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    executions += result.executions;
    steps += result.steps;
    ++count;
    const auto bound = preemptions == kAny ? "all" : std::to_string(preemptions);
    std::printf("%-64s %9llu executions, preemptions: %s, %.1f s\n", scenario.name.c_str(),
                static_cast<unsigned long long>(result.executions), bound.c_str(), took.count());
    if (!result.failure.empty()) {
      ++failed;
      std::printf("FAILED: %s\n  torchddp_shm_model replay '%s' '%s'\n", result.failure.c_str(), scenario.name.c_str(),
                  result.trace.c_str());
    }
  }
  std::printf("%d scenarios, %d failed, %llu executions, %llu steps\n", count, failed,
              static_cast<unsigned long long>(executions), static_cast<unsigned long long>(steps));
  return failed == 0 && count > 0 ? 0 : 1;
}

int repeat(const std::string& name, const std::string& trace) {
  for (const auto& scenario : scenarios()) {
    if (scenario.name != name) continue;
    const auto result = replay(scenario, trace);
    std::printf("%s\n%s\n", result.trace.c_str(), result.failure.empty() ? "nothing is wrong" : result.failure.c_str());
    return result.failure.empty() ? 0 : 1;
  }
  std::printf("no scenario has this name\n");
  return 2;
}

std::vector<Order> weaker(const Site& site) {
  if (site.order == Order::relaxed) return {};
  if (site.order != Order::seq_cst) return {Order::relaxed};
  if (site.kind == 'l') return {Order::acquire, Order::relaxed};
  if (site.kind == 's') return {Order::release, Order::relaxed};
  return {Order::acq_rel, Order::acquire, Order::release, Order::relaxed};
}

// Finds what goes wrong with each order weakened.
int weaken_all(uint64_t most, const std::string& part) {
  const auto all = scenarios();
  for (const auto& scenario : all) explore_random(scenario, kRandom);  // meets the places
  int caught = 0, missed = 0;
  for (const auto& site : sites()) {
    if (contains(site.file, "/model/") || !contains(to_string(site), part)) continue;
    for (const auto order : weaker(site)) {
      weaken(&site, order);
      std::string how;
      for (const auto& scenario : all) {
        int preemptions = 0;
        const auto result = deepen(scenario, most, preemptions);
        if (!result.failure.empty()) {
          how = scenario.name + ": " + result.failure;
          break;
        }
      }
      ++(how.empty() ? missed : caught);
      std::printf("%-18s %c %s -> %s: %s\n", to_string(site).c_str(), site.kind, to_string(site.order),
                  to_string(order), how.empty() ? "NOT CAUGHT" : how.c_str());
    }
  }
  weaken(nullptr, Order::relaxed);
  std::printf("%d caught, %d not caught\n", caught, missed);
  return 0;
}

int run(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  if (first == "replay" && argc == 4) return repeat(argv[2], argv[3]);
  if (first == "weaken")
    return weaken_all(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : kMost, argc > 3 ? argv[3] : "");
  const auto most = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : kMost;
  if (most > 0) return search(most, argc > 2 ? argv[2] : "");
  std::printf("%s", kUsage);
  return 2;
}

}  // namespace
}  // namespace torchddp::model

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 12);
  return torchddp::model::run(argc, argv);
}
