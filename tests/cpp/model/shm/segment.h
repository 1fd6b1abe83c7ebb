// In place of csrc/shm/segment.h: a part of the arena, without files, mappings and pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shm/fd.h"

namespace torchddp::shm {

inline int64_t sealed_bytes(const Fd&) { return -1; }

class Mapping {
 public:
  Mapping() = default;
  Mapping(int, int64_t) {}
  Mapping(std::byte* base, int64_t bytes) : base_(base), bytes_(bytes) {}

  std::byte* base() const { return base_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
};

class Segment {
 public:
  // Hands out [free, bytes).
  Segment(int rank, int size, std::byte* base, int64_t bytes, int64_t free)
      : rank_(rank), size_(size), base_(base), bytes_(bytes), end_(free) {}

  static int fd() { return -1; }
  std::byte* base() const { return base_; }
  int64_t bytes() const { return bytes_; }
  void write_header(int64_t offset);
  // What was released last, if anything, so that memory is used again soon.
  void* allocate(int64_t bytes);
  void release(void* memory) { released_.push_back(memory); }
  void keep_pages() {}
  int64_t offset_of(const void* memory) const { return static_cast<const std::byte*>(memory) - base_; }

 private:
  const int rank_, size_;
  std::byte* const base_;
  const int64_t bytes_;
  int64_t end_;
  std::vector<void*> released_;  // all of the same size
};

}  // namespace torchddp::shm
