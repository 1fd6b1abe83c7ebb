#include "transport/shm/staging_pool.h"

#include <algorithm>

#include "transport/shm/shm_transport.h"

namespace torchddp::transport {
namespace {

// A program's steps repeat: as many as it has operations under way at once, and then some.
constexpr size_t kMostFree = 16;
// Sizes are rounded up, so that the same memory serves neighbours.
constexpr int64_t kUnit = 64 * 1024;

int64_t size_of(const at::Tensor& memory) { return static_cast<int64_t>(memory.nbytes()); }

}  // namespace

at::Tensor StagingPool::take(ShmTransport& transport, int64_t bytes) {
  const auto wanted = (bytes + kUnit - 1) / kUnit * kUnit;
  const std::lock_guard lock(mutex_);
  // The smallest that fits; one that is much too large is wanted by another operation of the step.
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (size_of(*it) >= wanted && size_of(*it) <= 4 * wanted &&
        (best == free_.end() || size_of(*it) < size_of(*best))) {
      best = it;
    }
  }
  if (best != free_.end()) {
    auto memory = std::move(*best);
    free_.erase(best);
    return memory;
  }
  try {
    return transport.shared_bytes(wanted);
  } catch (const TransportError&) {
    if (free_.empty()) {
      throw;
    }
  }
  free_.clear();
  return transport.shared_bytes(wanted);
}

void StagingPool::give_back(at::Tensor memory) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(memory));
  if (free_.size() > kMostFree) {
    free_.erase(free_.begin());
  }
}

void StagingPool::clear() {
  const std::lock_guard lock(mutex_);
  free_.clear();
}

}  // namespace torchddp::transport
