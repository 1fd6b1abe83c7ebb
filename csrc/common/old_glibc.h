// The decision made by csrc/common/old_glibc.cpp, exposed for its test.
#pragma once

#include <ctime>

namespace torchddp {

// The calendar time at which another clock, which now shows `now`, will show `deadline`.
inline timespec calendar_deadline(const timespec& deadline, const timespec& now, const timespec& calendar) {
  constexpr long kSecond_ns = 1'000'000'000;
  timespec result{};
  result.tv_sec = calendar.tv_sec + deadline.tv_sec - now.tv_sec;
  result.tv_nsec = calendar.tv_nsec + deadline.tv_nsec - now.tv_nsec;
  while (result.tv_nsec < 0) {
    result.tv_nsec += kSecond_ns;
    result.tv_sec -= 1;
  }
  while (result.tv_nsec >= kSecond_ns) {
    result.tv_nsec -= kSecond_ns;
    result.tv_sec += 1;
  }
  return result;
}

}  // namespace torchddp
