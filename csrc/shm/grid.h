// How a large all-reduce is cut into chunks, and who owns which: the same on all ranks.
#pragma once

#include <cstdint>

#include "shm/operation.h"

namespace torchddp::shm {

struct Grid {
  Grid() = default;
  Grid(const Operation& operation, const Board& board);

  // Chunks [begin, end).
  struct Share {
    int begin = 0, end = 0;
    int size() const { return end - begin; }
  };
  // The first `owners` ranks have as many consecutive chunks each; the others, on several hosts, none.
  Share share(int rank) const;
  // Of elements.
  Range range(Share share) const;

  int64_t numel = 0;
  int64_t chunk_numel = 0;
  int each = 0;  // chunks of an owner; the last ones may be empty
  int owners = 0;
};

}  // namespace torchddp::shm
