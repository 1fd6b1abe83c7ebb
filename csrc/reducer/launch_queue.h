// Launches buckets and waits for them, in plan order on every rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "bucket/bucket.h"

namespace torchddp::reducer {

struct Parts;

// Takes a lock once per bucket, because hooks on several threads may complete buckets concurrently.
class LaunchQueue {
 public:
  explicit LaunchQueue(Parts& parts);

  void begin_step() { num_ready_ = next_launch_ = next_finish_ = 0; }
  // All gradients of the bucket are packed, or can be. `last`: the parameter whose hook this is; `incoming`: its incoming
  // gradient. Launches every bucket that is next in line. True if the last bucket of the step was launched.
  bool ready(int64_t index, int64_t last = -1, const at::Tensor* incoming = nullptr);
  // Waits until the averages of a launched bucket are in it.
  void finish(int64_t index);
  // Launches nothing from here on.
  void abandon();

  // If off, no bucket is launched before the last gradient is ready, so that ready times show computation alone and the time
  // after them communication alone. The results are the same. Every rank must use the same setting.
  void set_overlap(bool overlap) { overlap_ = overlap; }

  // Under join(): ranks without inputs can't tell which buckets the others skip, so those are sent as well.
  void skip_nothing() { skips_ = false; }

  // `agree` is collective: the ranks compare what must be equal before the next step sends anything.
  void before_next_step(std::function<void()> agree) { agree_ = std::move(agree); }
  // Calls it unless it has returned before.
  void agree() {
    if (agree_) [[unlikely]] {
      agree_();
      agree_ = nullptr;
    }
  }

 private:
  void launch(int64_t index);
  bool can_skip(const bucket::Bucket& bucket) const;
  void finish_early();
  std::string where(int64_t index) const;

  Parts& parts_;
  bool overlap_ = true;
  bool skips_;
  std::function<void()> agree_;
  std::mutex mutex_;
  int64_t num_ready_ = 0;
  int64_t next_launch_ = 0;
  int64_t next_finish_ = 0;
};

}  // namespace torchddp::reducer
