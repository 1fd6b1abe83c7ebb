// Memory for values that one rank makes and all ranks of the host use, where it can be the same memory for all of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchddp::transport {

// A rank sees everybody's part, and may change what it sees for itself alone. To make new values of its part it writes to the
// masters, when no other rank needs the old ones any more; everybody calls refresh() when all have written, and no earlier than that
// may rely on what it sees. Tensors keep the memory alive.
class Replicated {
 public:
  virtual ~Replicated() = default;
  // 1-d, `numel` elements from byte `offset` of what rank `owner` makes, as this rank sees it. Zeros at first.
  virtual at::Tensor seen(int owner, int64_t offset, int64_t numel, at::ScalarType dtype) const = 0;
  // The same memory of this rank's own part, to be written to.
  virtual at::Tensor masters(int64_t offset, int64_t numel, at::ScalarType dtype) const = 0;
  // What this rank has changed in what it sees of its own part, to the masters. Whole pages: what it has not changed must be the
  // masters' there.
  virtual void publish() = 0;
  // This rank sees the masters again, whatever it has changed.
  virtual void refresh() = 0;
};

}  // namespace torchddp::transport
