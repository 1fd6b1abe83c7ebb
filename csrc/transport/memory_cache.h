// Flat memory for one operation or one step, kept for the next who asks: the kernel clears new shared pages, which costs more than
// a copy.
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
  // Bytes (1-d, kByte), at least as many as asked for, newly allocated if none of the right size is free. They come back when the
  // last tensor over that memory is gone; whoever leaves an operation that may still write to them keeps one.
  at::Tensor lend(int64_t bytes, at::Device device);
  // Lets go of what nobody has, but for so many blocks; whether there was anything.
  bool trim(size_t blocks);
  // Lent, and kept to be lent.
  int64_t bytes() const;

 private:
  struct Shelf;
  const Allocate allocate_;
  const std::shared_ptr<Shelf> shelf_;
};

}  // namespace torchddp::transport
