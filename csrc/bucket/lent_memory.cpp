#include "bucket/lent_memory.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "common/check.h"
#include "common/errors.h"

namespace torchddp::bucket {
namespace {

// Sizes are rounded up, so that blocks serve buckets of about the same size.
constexpr int64_t kUnitBytes = 64 * 1024;

int64_t size_of(const at::Tensor& memory) { return static_cast<int64_t>(memory.nbytes()); }

}  // namespace

at::Tensor LentMemory::take(int64_t bytes, at::Device device, transport::Transport& transport) {
  bytes = std::max<int64_t>(kUnitBytes, (bytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes);
  const std::lock_guard lock(mutex_);
  auto best = free_.end();
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->device() == device && size_of(*block) >= bytes &&
        (best == free_.end() || size_of(*block) < size_of(*best))) {
      best = block;
    }
  }
  at::Tensor memory;
  if (best != free_.end()) {
    memory = std::move(*best);
    free_.erase(best);
  } else if (transport.reaches_any_memory()) {
    memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  } else {
    memory = transport.allocate(bytes, at::kByte, device);
    if (transport.lost_memory()) {
      throw TransportError(c10::str("rank ", transport.rank(), ": no room for ", bytes,
                                    " bytes of gradients on their way to another rank"));
    }
  }
  lent_bytes_ += size_of(memory);
  return memory;
}

void LentMemory::give_back(at::Tensor memory) {
  const std::lock_guard lock(mutex_);
  lent_bytes_ -= size_of(memory);
  free_.push_back(std::move(memory));
}

void LentMemory::trim(size_t blocks) {
  const std::lock_guard lock(mutex_);
  if (free_.size() > blocks) {
    free_.resize(blocks);
  }
}

void LentMemory::clear() {
  const std::lock_guard lock(mutex_);
  free_.clear();
  lent_bytes_ = 0;
}

int64_t LentMemory::bytes() const {
  const std::lock_guard lock(mutex_);
  auto bytes = lent_bytes_;
  for (const auto& block : free_) {
    bytes += size_of(block);
  }
  return bytes;
}

}  // namespace torchddp::bucket
