// Memory that other processes can map: a nameless file (memfd), mapped whole, filled as it is asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "shm/fd.h"

namespace torchddp::shm {

// The size of a file from elsewhere, -1 unless nobody can change it: what is mapped of it stays there to be touched.
int64_t sealed_bytes(const Fd& file);

// A mapping of a segment, one's own or a peer's. It begins where a huge page can.
class Mapping {
 public:
  Mapping() = default;
  // Of the first `bytes` of the file, which may be closed after that. Throws Unavailable.
  Mapping(int fd, int64_t bytes);
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* base() const { return base_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
};

struct HeldMemory {
  int64_t allocated = 0;  // bytes that allocate() has handed out
  int64_t huge = 0;       // bytes of those in huge pages
};

// This rank's segment: the header of layout.h, then memory for buckets. It has no name, belongs to this user alone, can't be
// resized by anybody (sealed), and is gone when the last process that maps it is. Virtual size is that of the machine's memory, or
// several times this rank's share of it; pages are there from allocate() to release() only, and are allocated by the kernel
// before they are touched, so that a machine without room says no instead of sending SIGBUS. They are huge where a block holds whole ones
// and the kernel has some left, and this rank is the first to touch them, in allocate(): they lie in its own node's memory. Thread-safe.
class Segment {
 public:
  // `limit_bytes`: how much allocate() may hand out; 0 for no limit but the machine's. `node`: of memory, next to this rank; none for the
  // one that is next to its processors. Throws Unavailable.
  Segment(int rank, int size, int64_t limit_bytes, std::optional<int> node = std::nullopt);

  int fd() const { return fd_.get(); }
  std::byte* base() const { return mapping_.base(); }
  int64_t bytes() const { return mapping_.bytes(); }

  // At least `bytes` of memory, 64-byte aligned; large blocks on page boundaries. Contents are unspecified. Null, with errno set,
  // if there is no room. A forked child gets nothing: parent and child would hand out the same memory.
  void* allocate(int64_t bytes);
  void release(void* memory);
  // Reads what the kernel knows of all mappings: milliseconds.
  HeldMemory held() const;
  // Whether all of [memory, memory + bytes) is in what allocate() hands out.
  bool contains(const void* memory, int64_t bytes) const;
  int64_t offset_of(const void* memory) const { return static_cast<const std::byte*>(memory) - base(); }

 private:
  bool populate(int64_t offset, int64_t bytes);

  Fd fd_;
  Mapping mapping_;
  int forks_ = 0;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> free_;             // offset -> bytes, neighbours merged
  std::unordered_map<int64_t, int64_t> taken_;  // offset -> bytes
  int64_t limit_bytes_ = 0;
  int64_t taken_bytes_ = 0;
};

}  // namespace torchddp::shm
