// How a large all-reduce is cut into chunks, and who owns which: pure functions with the same result on all ranks.
#pragma once

#include <cstdint>
#include <span>

#include "shm/groups.h"
#include "shm/operation.h"

namespace torchddp::shm {

struct Grid {
  int64_t numel = 0;
  int64_t chunk_numel = 0;
  int chunks = 0;

  // Each of `owners` has about the same number of consecutive chunks.
  int begin(int owner, int owners) const { return static_cast<int>(int64_t{chunks} * owner / owners); }
  int owner(int chunk, int owners) const { return static_cast<int>(((int64_t{chunk} + 1) * owners - 1) / chunks); }
  // The elements of chunks [first, last).
  Range range(int first, int last) const;
};

// The memory nodes that an all-reduce distinguishes: a single one if sums can't be passed on, see Note [Chunks].
std::span<const Group> nodes_of(const Operation& operation, const Board& board);
// How many of a node's ranks own chunks, counted from the first: all of them unless there are several hosts.
int owners_of(const Group& node, const Board& board);
Grid grid_of(const Operation& operation, const Board& board);

}  // namespace torchddp::shm
