// A file of shared memory as one process sees it: what the file holds, but for the pages that this process has changed.
//
// Note [Copies that are made when they are needed]
// The mapping is private (MAP_PRIVATE): reading goes to the pages that all processes share, and follows what is written there;
// the first write to a page gives this process a page of its own, with what the shared one held, which follows no more. The
// kernel tells which pages those are (/proc/self/pagemap), so that the owner's changes can be taken over, and everybody's
// dropped. A process that forks shares its own pages with the child as ever, and the others with everybody.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shm/segment.h"

namespace torchddp::shm {

class PrivateView {
 public:
  struct Range {
    int64_t begin, end;  // bytes, whole pages
  };

  // Of the first `bytes` of the file, which may be closed after that. Throws Unavailable.
  PrivateView(int fd, int64_t bytes) : mapping_(fd, bytes, Mapping::Writes::kPrivate) {}

  std::byte* base() const { return mapping_.base(); }
  int64_t bytes() const { return mapping_.bytes(); }
  // Pages that this process has changed, ascending, neighbours as one. Throws Unavailable where the kernel doesn't say.
  std::vector<Range> changed() const;
  // Gives up this process's own pages of a range, where it can; a process may have locked them.
  bool drop(Range range);

 private:
  Mapping mapping_;
};

}  // namespace torchddp::shm
