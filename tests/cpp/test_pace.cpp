// Rate limits for calls that are requested too often.
#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "check.h"
#include "common/pace.h"

namespace torchddp {
namespace {

using namespace std::chrono_literals;

int let_through(Pace& pace, int calls, Pace::Clock::time_point first, std::chrono::nanoseconds apart) {
  int passed = 0;
  for (int i = 0; i < calls; ++i) {
    passed += pace.is_due(first + i * apart) ? 1 : 0;
  }
  return passed;
}

TEST(pace_lets_one_call_through_in_each_interval) {
  const Pace::Clock::time_point start{1h};
  Pace pace(5us);
  CHECK(let_through(pace, 1000, start, 1us) == 200);
  CHECK(let_through(pace, 1000, start + 1s, 5us) == 1000);
  CHECK(let_through(pace, 1000, start + 2s, 0us) == 1);
  CHECK(!pace.is_due(start + 2s + 4999ns));
  CHECK(pace.is_due(start + 2s + 5us));
}

TEST(pace_counts_for_all_threads_together) {
  constexpr int kThreads = 4, kRounds = 200;
  const Pace::Clock::time_point start{1h};
  Pace pace(5us);
  std::barrier together(kThreads);
  std::atomic<int> passed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) {
        together.arrive_and_wait();
        passed += pace.is_due(start + i * 5us) ? 1 : 0;
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(passed.load() == kRounds);
}

}  // namespace
}  // namespace torchddp
