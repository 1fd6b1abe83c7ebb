// Which memory a communicator has as windows, and which it will have. Not for use outside of gpu/.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gpu/nccl.h"

namespace torchddp::gpu {

// Note [When windows are made]
// Registering a window is collective, and NCCL places it at an offset that each rank works out alone from what is free: the offsets
// must come out equal. But memory is asked for, and let go of, where ranks may differ: one has no room, one alone gives up a step and
// lays its buckets out again, one keeps a gradient for longer. So allocating registers nothing, and letting go gives nothing back. Where
// ranks agree anyhow (transport::agree_on_memory) each tells what it would register and give back now, and what it has before. Only if
// all say the same it is done: what was told, not what has come since. Otherwise all go on with other memory.
//
// Memory that was laid out anew after a step that failed stays unregistered until ranks agree again. NCCL takes other kernels for it, so
// if that happened to some ranks only, their next operation does not end: the time limit ends it.

struct Block {
  void* memory = nullptr;
  int64_t bytes = 0;
  uint64_t number = 0;      // in the order of registration; 0: not registered
  Window window = nullptr;  // NCCL writes it whenever it gets to it
};
using BlockPtr = std::shared_ptr<Block>;

// Keeps the lists; frees and registers nothing itself. Not thread-safe.
class WindowMemory {
 public:
  struct Change {
    std::vector<BlockPtr> give_back, make;
  };

  // Somebody's, and not registered yet.
  void add(BlockPtr block) { new_.push_back(std::move(block)); }
  // Nobody's any more.
  void let_go(BlockPtr block);

  // See Communicator::memory_state().
  int64_t propose();
  // What was proposed last, to be done now.
  Change take_proposal();
  // All that was let go of.
  std::vector<BlockPtr> take_let_go();

 private:
  std::vector<BlockPtr> new_;     // as it was asked for
  std::vector<BlockPtr> let_go_;  // by number
  Change proposed_;
  uint64_t history_ = 1;
  uint64_t registered_ = 0;
};

}  // namespace torchddp::gpu
