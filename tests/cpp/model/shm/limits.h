// In place of csrc/shm/limits.h: as small as can be, so that a few operations reuse slots and have several chunks.
#pragma once

#include <cstdint>

namespace torchddp::shm {

inline constexpr uint64_t kSlots = 2;
inline constexpr int kMaxChannels = 3;
inline constexpr int64_t kEagerBytes = 8;
inline constexpr int64_t kChunkBytes = 8;
inline constexpr int64_t kUnit = 2;

// Set by a scenario. With these, a rank looks once more before it sleeps.
inline int kSpins = 0;
inline int kYields = 0;
inline int kCrowdedSpins = 0;
inline int kCrowdedYields = 0;
inline constexpr int kHelpAfter = 1;

}  // namespace torchddp::shm
