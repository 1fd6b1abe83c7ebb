// The decision made by csrc/common/old_glibc.cpp, exposed for its test.
#pragma once

#include <ctime>

namespace torchddp {

// The calendar time at which another clock, which now shows `now`, will show `deadline`.
inline timespec calendar_deadline(const timespec& deadline, const timespec& now, const timespec& calendar) {
  constexpr long kSecond_ns = 1'000'000'000;
  const long ns = calendar.tv_nsec + deadline.tv_nsec - now.tv_nsec;  // between -1 and 2 seconds
  const long carry = ns < 0 ? -1 : ns / kSecond_ns;
  return {calendar.tv_sec + deadline.tv_sec - now.tv_sec + carry, ns - carry * kSecond_ns};
}

}  // namespace torchddp
