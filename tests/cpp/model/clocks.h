// Vector clocks: what has happened before what.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace torchddp::model {

inline constexpr int kMaxThreads = 6;

struct Clocks {
  std::array<uint32_t, kMaxThreads> at{};
  // Whether something was read before that did not happen before: a store that was not acquired.
  bool outran = false;

  void join(const Clocks& other) {
    outran |= other.outran;
    for (int i = 0; i < kMaxThreads; ++i) at[i] = std::max(at[i], other.at[i]);
  }
  // Whether the step that a thread took at this time happened before.
  bool covers(int thread, uint32_t time) const { return thread < 0 || time <= at[thread]; }
};

}  // namespace torchddp::model
