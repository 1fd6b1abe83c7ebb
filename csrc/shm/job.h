// An operation that this rank has started, and where it is to be done.
#pragma once

#include <cstdint>
#include <string>

#include "shm/done.h"
#include "shm/failure.h"
#include "shm/operation.h"

namespace torchddp::shm {

struct Job {
  const EngineConfig& config;
  const Board& board;
  Failure& failure;
  Done& done;
  Operation operation = {};
  uint64_t seq = UINT64_MAX;

  int rank() const { return board.rank(); }
  Slot& slot(int of) const { return board.slot(of, seq); }
  bool has_posted(int of) const { return board.has_posted(of, seq); }
  int64_t item() const { return kernels::item_size(operation.type); }
  std::string describe() const { return shm::describe(operation, seq); }
};

}  // namespace torchddp::shm
