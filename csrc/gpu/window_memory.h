// Which memory a communicator has registered as windows, and which it will. Internal to gpu/.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gpu/nccl.h"

namespace torchddp::gpu {

// Note [When windows are made]
// Registering a window is collective, and NCCL places it at an offset that each rank computes on its own from what is free: the
// offsets must come out equal. But ranks may allocate and release memory at different times: one has no room, one alone
// abandons a step and lays out its buckets again, one keeps a gradient longer. So allocating registers nothing, and releasing
// returns nothing. At points where ranks agree anyway (transport::agree_on_memory), each announces what it would register and
// return now, and what it already has. Only if all say the same is it done, for what was announced and not for what has come
// since. Otherwise all continue with ordinary memory.
//
// Memory laid out again after a failed step stays unregistered until ranks next agree. NCCL uses different kernels for it, so
// if only some ranks did that, their next operation hangs until the time limit ends it.

struct Block {
  void* memory = nullptr;
  int64_t bytes = 0;
  uint64_t number = 0;      // in registration order; 0: not registered
  Window window = nullptr;  // NCCL may write it later
};
using BlockPtr = std::shared_ptr<Block>;

// Keeps the lists; frees and registers nothing itself. Not thread-safe.
class WindowMemory {
 public:
  struct Change {
    std::vector<BlockPtr> give_back, make;
  };

  // A block in use that is not registered yet.
  void add(BlockPtr block) { new_.push_back(std::move(block)); }
  // A block that is no longer used.
  void let_go(BlockPtr block);

  // See Communicator::memory_state().
  int64_t propose();
  // The last proposal, which the caller now carries out.
  Change take_proposal();
  // Every released block.
  std::vector<BlockPtr> take_let_go();

 private:
  std::vector<BlockPtr> new_;     // as it was asked for
  std::vector<BlockPtr> let_go_;  // by number
  Change proposed_;
  uint64_t history_ = 1;
  uint64_t registered_ = 0;
};

}  // namespace torchddp::gpu
