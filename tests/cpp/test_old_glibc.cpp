// The replacements of csrc/common/old_glibc.cpp behave like libc's functions.
#include "common/old_glibc.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "check.h"

namespace torchddp {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

TEST(OldGlibc_CalendarDeadlineIsAsFarAway) {
  const auto later = calendar_deadline({107, 200'000'000}, {100, 900'000'000}, {5'000, 0});
  CHECK_EQ(later.tv_sec, 5'006);
  CHECK_EQ(later.tv_nsec, 300'000'000);
  const auto carried = calendar_deadline({100, 900'000'000}, {100, 0}, {5'000, 999'999'999});
  CHECK_EQ(carried.tv_sec, 5'001);
  CHECK_EQ(carried.tv_nsec, 899'999'999);
}

TEST(OldGlibc_ConditionVariableWaitsAndWakes) {
  std::mutex mutex;
  std::condition_variable wake;
  bool ready = false;
  std::unique_lock lock(mutex);
  const auto began = Clock::now();
  CHECK(!wake.wait_for(lock, milliseconds(20), [&] { return ready; }));
  CHECK(Clock::now() - began >= milliseconds(20));

  std::thread other([&] {
    const std::lock_guard held(mutex);
    ready = true;
    wake.notify_one();
  });
  wake.wait(lock, [&] { return ready; });
  CHECK(wake.wait_for(lock, milliseconds(20), [&] { return ready; }));
  lock.unlock();
  other.join();
}

TEST(OldGlibc_TryLockAndOnceKeepTheirMeaning) {
  std::mutex mutex;
  const std::unique_lock held(mutex);
  bool got_it = true;
  std::thread([&] { got_it = std::unique_lock(mutex, std::try_to_lock).owns_lock(); }).join();
  CHECK(!got_it);

  std::once_flag once;
  int calls = 0;
  for (int i = 0; i < 3; ++i) {
    std::call_once(once, [&] { ++calls; });
  }
  CHECK_EQ(calls, 1);
}

}  // namespace
}  // namespace torchddp
