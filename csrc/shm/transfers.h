// What ranks move between each other, counted if TORCHDDP_COUNT_LINES is defined: in the C++ tests, which check it against the
// model of docs/one_host.md.
#pragma once

#include <cstdint>

namespace torchddp::shm {

// By one rank.
struct Transfers {
  int64_t lines = 0;      // cache lines of other ranks that it read to see what they have posted, summed or finished
  int64_t far_lines = 0;  // those of ranks on other nodes
  int64_t bytes = 0;      // of other ranks' blocks that it read or wrote
  int64_t far_bytes = 0;

  Transfers& operator+=(const Transfers& other) {
    lines += other.lines;
    far_lines += other.far_lines;
    bytes += other.bytes;
    far_bytes += other.far_bytes;
    return *this;
  }
};

}  // namespace torchddp::shm
