// Sizes and counts that the protocol works with at any value. tests/cpp/model has smaller ones.
#pragma once

#include <cstdint>

namespace torchddp::shm {

// How many operations may be in flight at once. One more waits for the oldest.
inline constexpr uint64_t kSlots = 64;
// How many channels can be opened during the life of a mesh.
inline constexpr int kMaxChannels = 4096;
// Inputs up to this size are sent in the post itself: one synchronization instead of two.
inline constexpr int64_t kEagerBytes = 8192;
// Of each rank's block: small enough to stay in cache until it is written to all, large enough to be worth claiming.
inline constexpr int64_t kChunkBytes = 64 * 1024;
// Chunks begin at multiples of this many elements: whole cache lines for every type.
inline constexpr int64_t kUnit = 128;

// A waiting rank spins for about 100 us if each rank has a processor, then yields for about 10 ms more before it sleeps on a
// futex. On a virtual machine, waking the others costs the last rank to arrive 20 to 70 us, and they return 100 us after that
// if they get their processors back at once, which they often don't.
inline constexpr int kSpins = 2000;
inline constexpr int kYields = 16'000;
// If ranks share processors.
inline constexpr int kCrowdedSpins = 20;
inline constexpr int kCrowdedYields = 100;
// After this many checks, an owner that has not begun its chunks may not be running.
inline constexpr int kHelpAfter = 64;

}  // namespace torchddp::shm
