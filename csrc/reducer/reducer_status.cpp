// What a Reducer tells of itself while others use it.
#include "reducer/reducer_inl.h"

namespace torchddp::reducer {

// The layout is left out while it changes: a thread that only reports must not wait for one that allocates.
Status Reducer::status() const {
  auto status = live_->read();
  status.armed = armed_.load(std::memory_order_acquire) || incomplete_.load(std::memory_order_acquire);
  const std::unique_lock lock(layout_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    return status;
  }
  status.has_buckets = true;
  for (const auto& bucket : buckets_) {
    auto& entry = status.buckets.emplace_back(BucketStatus{bucket->state, {}});
    if (!status.armed) {
      continue;
    }
    for (const auto param : bucket->params()) {
      if (marked_[static_cast<size_t>(param)].load(std::memory_order_relaxed) == kNotMarked) {
        entry.missing.push_back(param);
      }
    }
  }
  return status;
}

}  // namespace torchddp::reducer
