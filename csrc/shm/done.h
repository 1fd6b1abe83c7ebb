// How far each rank's own work has progressed, as last observed.
#pragma once

#include <vector>

#include "shm/board.h"

namespace torchddp::shm {

// Only looked up again where it matters, usually once in kSlots operations.
class Done {
 public:
  explicit Done(const Board& board) : board_(board), seen_(static_cast<size_t>(board.size())) {}

  // Whether a rank has done its own work in an operation.
  bool has(int rank, uint64_t seq) {
    auto& seen = seen_[static_cast<size_t>(rank)];
    if (seen <= seq) {
      seen = board_.header(rank).done.load();
    }
    return seen > seq;
  }

 private:
  const Board& board_;
  std::vector<uint64_t> seen_;
};

}  // namespace torchddp::shm
