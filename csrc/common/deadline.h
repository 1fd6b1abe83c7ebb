// When a time limit is over, for limits of any size: `now + limit` overflows for what a user may give to say "never".
#pragma once

#include <chrono>

namespace torchddp {

// `since + limit`, or the end of time if that is sooner.
template <class Rep, class Period>
std::chrono::steady_clock::time_point deadline_after(
    std::chrono::duration<Rep, Period> limit,
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now()) {
  using Limit = std::chrono::duration<Rep, Period>;
  constexpr auto kEnd = std::chrono::steady_clock::time_point::max();
  if (limit <= Limit::zero()) {
    return since;
  }
  // Compared in the limit's own unit, in which both fit.
  return limit < std::chrono::duration_cast<Limit>(kEnd - since) ? since + limit : kEnd;
}

}  // namespace torchddp
