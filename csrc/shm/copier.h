// Copies to memory that other processes read.
//
// Note [Past the caches or not]
// A store to a line that a peer has read first takes the line out of that peer's cache. Between cores that share a last-level
// cache this is free: the peer finds the copy in that cache and memory is not touched, so it takes half the time of
// non-temporal stores. Between cores without a common cache it takes up to ten times as long as the copy, line after line, and
// non-temporal stores are best. Which case applies depends on where the ranks run, and on a virtual machine that changes over
// time. So it is measured by the copies themselves, for each size.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>

#include "shm/quicker.h"

namespace torchddp::shm {

// Thread-safe.
class Copier {
 public:
  // Like memcpy. A thread that sees a store made after this call also sees the copy.
  void copy(void* to, const void* from, int64_t bytes);

 private:
  // Powers of two, in kilobytes; the last one covers everything larger.
  static constexpr int kSizes = 16;

  std::mutex mutex_;
  std::array<Quicker, kSizes> quicker_;
};

// The same with non-temporal stores.
void stream_copy(void* to, const void* from, int64_t bytes);

}  // namespace torchddp::shm
