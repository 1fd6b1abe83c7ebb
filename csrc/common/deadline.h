// Deadlines for limits of any size: `now + limit` overflows for the values that users pass to mean "never".
#pragma once

#include <chrono>

namespace torchddp {

// `since + limit`, or the end of time if that comes first.
template <class Rep, class Period>
std::chrono::steady_clock::time_point deadline_after(
    std::chrono::duration<Rep, Period> limit,
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now()) {
  using Limit = std::chrono::duration<Rep, Period>;
  constexpr auto kEnd = std::chrono::steady_clock::time_point::max();
  if (limit <= Limit::zero()) return since;
  // Compared in the limit's own unit, in which both fit.
  return limit < std::chrono::duration_cast<Limit>(kEnd - since) ? since + limit : kEnd;
}

}  // namespace torchddp
