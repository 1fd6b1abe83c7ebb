// Flat memory for buckets that need it during backward only.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <vector>

#include "transport/transport.h"

namespace torchddp::bucket {

// Keeps what it was given back for whoever asks next. Thread-safe.
class LentMemory {
 public:
  // Bytes (1-d, kByte) that collectives of `transport` reach, at least as many as asked for. Throws TransportError if there is no room.
  at::Tensor take(int64_t bytes, at::Device device, transport::Transport& transport);
  void give_back(at::Tensor memory);
  // Keeps this many blocks at most, of those that nobody has.
  void trim(size_t blocks);
  // The next ones are of another transport.
  void clear();
  int64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::vector<at::Tensor> free_;
  int64_t lent_bytes_ = 0;
};

}  // namespace torchddp::bucket
