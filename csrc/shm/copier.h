// Copies to memory that other processes read.
//
// Note [Past the caches or not]
// A store to a line that a peer has read takes it out of that peer's cache first. Between cores of one last-level cache that is nothing,
// the peer finds the copy in that cache, and memory is not touched at all: half the time of stores that go past the caches. Between cores
// that have none in common it takes up to ten times as long as the copy, line after line, and to go past the caches is best. Which of
// the two it is depends on where the ranks run, and on a virtual machine that changes with time. So it is measured, by the copies
// themselves, for each size.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>

#include "shm/quicker.h"

namespace torchddp::shm {

// Thread-safe.
class Copier {
 public:
  // As memcpy. Whoever sees what is stored after the call sees the copy.
  void copy(void* to, const void* from, int64_t bytes);

 private:
  // Powers of two, of kilobytes; beyond the last it is all the same.
  static constexpr int kSizes = 16;

  std::mutex mutex_;
  std::array<Quicker, kSizes> quicker_;
};

// The same, past the caches.
void stream_copy(void* to, const void* from, int64_t bytes);

}  // namespace torchddp::shm
