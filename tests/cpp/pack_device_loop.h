// The simplest device: runs the bodies of the pack kernels in loops over blocks and threads on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/pack_device_body.h"
#include "kernels/pack_device_plan.h"

namespace torchddp::kernels::device {

// How a launch's blocks are run. Results must not depend on it.
struct Schedule {
  int64_t max_blocks = kMaxBlocks;  // fewer blocks than in the plan give longer slices
  bool backwards = false;           // order of blocks and threads
};

template <class Kernel, int kCapacity>
void run_grid(const PieceTable<kCapacity>& table, uint32_t num_blocks, bool backwards) {
  for (uint32_t i = 0; i < num_blocks; ++i) {
    for (int j = 0; j < kThreads; ++j) {
      Kernel::run_thread(table, num_blocks, backwards ? num_blocks - 1 - i : i, backwards ? kThreads - 1 - j : j);
    }
  }
}

// Returns 0 or the error.
inline int run(const PackJob& job, Schedule schedule = {}) {
  return for_each_launch(job, [&](auto& table, uint32_t planned) {
    const auto num_blocks = static_cast<uint32_t>(std::min<int64_t>(planned, schedule.max_blocks));
    visit_kernel(job, [&](auto pack) { run_grid<decltype(pack)>(table, num_blocks, schedule.backwards); });
    return 0;
  });
}

}  // namespace torchddp::kernels::device
