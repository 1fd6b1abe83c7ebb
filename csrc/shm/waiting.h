// What all waits in shared memory have in common.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <chrono>
#include <cstdint>

namespace torchddp::shm {

// About 100 us, if each rank has a processor; fewer if they share processors.
inline constexpr int kSpins = 2000;
inline constexpr int kCrowdedSpins = 20;
// How often a sleeping rank checks that its peers are alive. The bound visible to users is two seconds.
inline constexpr int64_t kSleepNs = 20'000'000;
inline constexpr std::chrono::milliseconds kPeerCheck{10};

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace torchddp::shm
