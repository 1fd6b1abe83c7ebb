// Searches the executions of the shared-memory protocol: docs/shm_model.md.
#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <string>

#include "model/memory.h"
#include "model/scenarios.h"

namespace torchddp::model {
namespace {

constexpr const char* kUsage =
    "torchddp_shm_model [MOST [NAME]]    searches up to MOST executions of each scenario whose name contains NAME\n"
    "torchddp_shm_model replay NAME TRACE [PLACE ORDER]    prints the steps of an execution\n"
    "torchddp_shm_model weaken [MOST [PLACE [PAGE]]]    searches with each memory order weakened in turn\n";

constexpr uint64_t kMost = 400;
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
    const auto bound = preemptions == kAny ? "all" : preemptions < 0 ? "-" : std::to_string(preemptions);
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

Order order_named(const std::string& name) {
  for (const auto order : {Order::acquire, Order::release, Order::acq_rel}) {
    if (name == to_string(order)) return order;
  }
  return Order::relaxed;
}

int repeat(const std::string& name, const std::string& trace, const std::string& place, Order order) {
  for (const auto& scenario : scenarios()) {
    if (scenario.name != name) continue;
    explore_random(scenario, kRandom);  // meets the places
    for (const auto& site : sites()) {
      if (site.name() == place) weaken(&site, order);
    }
    tell_steps(true);
    const auto result = replay(scenario, trace);
    std::printf("%s\n", result.failure.empty() ? "nothing is wrong" : result.failure.c_str());
    return result.failure.empty() ? 0 : 1;
  }
  std::printf("no scenario has this name\n");
  return 2;
}

// What is found with an order weakened, or nothing: with a few executions of each scenario, then with more of those that need
// few. `first`: the scenario to begin with, then the one that found it.
std::string find_fault(const std::vector<Scenario>& all, size_t& first, uint64_t most) {
  for (const bool is_deep : {false, true}) {
    for (size_t i = 0; i < all.size(); ++i) {
      const auto at = (first + i) % all.size();
      if (is_deep && (all[at].size > 2 || all[at].looks > 0)) continue;
      int preemptions = 0;
      const auto result = deepen(all[at], is_deep ? most : most / 10, preemptions);
      if (!result.failure.empty()) {
        first = at;
        return all[at].name + ": " + result.failure + "\n  '" + all[at].name + "' '" + result.trace + "'";
      }
    }
  }
  return "";
}

// A row of the page's table: what is stronger than was needed here.
std::string row(const Site& site, const std::string& enough) {
  return "| `" + site.name() + "` | " + to_string(site.order) + " | " + enough + " |";
}

// Whether the page has exactly these rows.
bool agrees(const std::string& page, const std::vector<std::string>& rows) {
  std::ifstream file(page);
  std::set<std::string> missing(rows.begin(), rows.end());
  bool agrees = true;
  for (std::string line; std::getline(file, line);) {
    const auto known = std::ranges::find_if(missing, [&](const std::string& row) { return line.starts_with(row); });
    if (known != missing.end()) {
      missing.erase(known);
    } else if (line.starts_with("| `") && (contains(line, ".cpp: ") || contains(line, ".h: "))) {
      std::printf("%s has, but should not: %s\n", page.c_str(), line.c_str());
      agrees = false;
    }
  }
  for (const auto& line : missing) std::printf("%s lacks: %s\n", page.c_str(), line.c_str());
  return agrees && missing.empty();
}

// Weakens one order after the other. All that no fault comes of must be on the page; without one, there must be none.
int weaken_all(uint64_t most, const std::string& part, const std::string& page) {
  const auto all = scenarios();
  for (const auto& scenario : all) explore_random(scenario, kRandom / 2);  // meets the places
  std::vector<std::string> rows;
  size_t first = 0;
  int caught = 0, missed = 0;
  for (const auto& site : sites()) {
    if (!contains(site.name(), part)) continue;
    std::string enough;
    for (const auto order : site.weaker()) {
      // With an order that is stronger than one that is enough, less can happen.
      if (!enough.empty() && (enough == "relaxed" || order == Order::acq_rel)) continue;
      weaken(&site, order);
      const auto fault = find_fault(all, first, most);
      std::printf("%s, %s -> %s: %s\n", site.name().c_str(), to_string(site.order), to_string(order),
                  fault.empty() ? "nothing found" : fault.c_str());
      ++(fault.empty() ? missed : caught);
      if (fault.empty()) enough += (enough.empty() ? "" : ", ") + std::string(to_string(order));
    }
    weaken(nullptr);
    if (!enough.empty()) rows.push_back(row(site, enough));
  }
  std::printf("%d weaker orders found out, %d not\n", caught, missed);
  if (caught == 0) return 1;
  return page.empty() ? (missed == 0 ? 0 : 1) : (agrees(page, rows) ? 0 : 1);
}

int run(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  const auto text = [&](int i) { return std::string(i < argc ? argv[i] : ""); };
  if (first == "replay") return repeat(text(2), text(3), text(4), order_named(text(5)));
  if (first == "weaken") {
    return weaken_all(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : kMost, text(3), text(4));
  }
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
