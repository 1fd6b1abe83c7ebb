// Time limits up to the largest representable duration.
#include "check.h"
#include "common/deadline.h"

namespace torchddp {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

TEST(deadline_is_the_limit_later_or_the_end_of_time) {
  const Clock::time_point since{1h};
  CHECK(deadline_after(5ms, since) == since + 5ms);
  CHECK(deadline_after(0ms, since) == since);
  CHECK(deadline_after(-5ms, since) == since);  // already over
  CHECK(deadline_after(std::chrono::milliseconds::min(), since) == since);
  CHECK(deadline_after(std::chrono::hours(24 * 365 * 100), since) == since + std::chrono::hours(24 * 365 * 100));
  for (const auto limit : {std::chrono::milliseconds::max(), std::chrono::milliseconds(86'399'999'999'999'999),
                           std::chrono::milliseconds::max() - 1ms}) {
    CHECK(deadline_after(limit, since) == Clock::time_point::max());
  }
  const auto all_that_is_left = Clock::time_point::max() - since;
  CHECK(deadline_after(all_that_is_left, since) == Clock::time_point::max());
  CHECK(deadline_after(all_that_is_left, since + 1ns) == Clock::time_point::max());
  CHECK(deadline_after(5ms) > Clock::now() - 1h);
}

}  // namespace
}  // namespace torchddp
