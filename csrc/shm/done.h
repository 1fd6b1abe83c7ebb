// How far the ranks have come with their own work, as last seen.
#pragma once

#include <vector>

#include "shm/board.h"

namespace torchddp::shm {

// Looked up again only where it matters: once in kSlots operations as a rule.
class Done {
 public:
  explicit Done(const Board& board) : board_(board), seen_(static_cast<size_t>(board.size())) {}

  // Whether a rank's own work in an operation is done.
  bool has(int rank, uint64_t seq) {
    auto& seen = seen_[static_cast<size_t>(rank)];
    if (seen <= seq) {
      seen = board_.header(rank).done.load();
      board_.count_lines(rank, 1);
    }
    return seen > seq;
  }

 private:
  const Board& board_;
  std::vector<uint64_t> seen_;
};

}  // namespace torchddp::shm
