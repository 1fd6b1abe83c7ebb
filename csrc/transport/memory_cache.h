// Flat memory for one operation or step, cached for the next use: the kernel clears new shared pages, which costs more than a
// copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace torchddp::transport {

// Thread-safe.
class MemoryCache {
 public:
  using Allocate = std::function<at::Tensor(int64_t bytes, at::Device device)>;

  explicit MemoryCache(Allocate allocate);
  // Returns bytes (1-d, kByte), at least as many as requested, newly allocated if no free block fits. They return to the cache
  // when the last tensor over that memory is gone; code that abandons an operation which may still write to them keeps one.
  at::Tensor lend(int64_t bytes, at::Device device);
  // Frees unused memory except for this many blocks. True if anything was freed.
  bool trim(size_t blocks);
  // Lent and cached.
  int64_t bytes() const;

 private:
  struct Shelf;
  const Allocate allocate_;
  const std::shared_ptr<Shelf> shelf_;
};

}  // namespace torchddp::transport
