// Memory that other processes can map: an anonymous file (memfd), mapped as a whole and populated on demand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

#include "shm/fd.h"

namespace torchddp::shm {

// The size of a file from another process, or -1 unless it is sealed, so that a mapping of it stays valid.
int64_t sealed_bytes(const Fd& file);

// A mapping of a segment, our own or a peer's. Aligned to huge pages. A child that fork() makes gets other memory at the same
// addresses: of the peers' segments zeros, and of our own (`keep_private`) pages that are copied when it writes to them.
class Mapping {
 public:
  Mapping() = default;
  // Maps the first `bytes` of the file, which may be closed afterwards. Throws Unavailable.
  Mapping(int fd, int64_t bytes);
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* base() const { return base_; }
  int64_t bytes() const { return bytes_; }
  // `fd`: of the mapped file; it stays open for as long as the mapping exists.
  void keep_private(int fd) const;

 private:
  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
};

// This rank's segment: the header of layout.h, then memory for buckets. It has no name, is private to the user, is sealed
// against resizing, and disappears with the last process that maps it. Its virtual size is that of the machine's memory, or
// several times this rank's share of it. Pages exist only from allocate() to release(), and are allocated by the kernel before
// they are touched, so that a machine without room reports an error instead of sending SIGBUS. Blocks that hold whole huge
// pages use them while the kernel has some. allocate() touches the memory first, so that it is on this rank's own memory node.
// Thread-safe.
class Segment {
 public:
  // `limit_bytes`: how much allocate() may hand out; 0: limited only by the machine. Throws Unavailable.
  Segment(int rank, int size, int64_t limit_bytes);

  int fd() const { return fd_.get(); }
  std::byte* base() const { return mapping_.base(); }
  int64_t bytes() const { return mapping_.bytes(); }

  // A new header of this rank, at the beginning or in a block.
  void write_header(int64_t offset);
  // At least `bytes` of memory, 64-byte aligned; large blocks are page-aligned. The contents are unspecified. Null, with errno
  // set, if there is no room. A forked child gets nothing, because parent and child would hand out the same memory.
  void* allocate(int64_t bytes);
  void release(void* memory);
  // Peers may still read or write what is released from now on: its pages last as long as anyone maps them.
  void keep_pages();
  // How much allocate() has handed out.
  int64_t taken_bytes() const {
    const std::lock_guard lock(mutex_);
    return taken_bytes_;
  }
  // Whether all of [memory, memory + bytes) was handed out by allocate().
  bool contains(const void* memory, int64_t bytes) const;
  int64_t offset_of(const void* memory) const { return static_cast<const std::byte*>(memory) - base(); }

 private:
  bool populate(int64_t offset, int64_t bytes);

  const int rank_, size_;
  Fd fd_;
  Mapping mapping_;
  int forks_ = 0;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> free_;             // offset -> bytes, neighbors merged
  std::unordered_map<int64_t, int64_t> taken_;  // offset -> bytes
  int64_t limit_bytes_ = 0;
  int64_t taken_bytes_ = 0;
  bool keeps_pages_ = false;
};

}  // namespace torchddp::shm
