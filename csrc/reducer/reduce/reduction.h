// How one bucket is reduced. A way of doing it is a class; see Reductions, which chooses.
#pragma once

#include "bucket/bucket.h"

namespace torchddp::reducer {

// One for each bucket, with all state of its reduction. start() and poll() are called under the queue's lock, one operation at a
// time. Errors: TransportError.
class Reduction {
 public:
  virtual ~Reduction() = default;
  Reduction() = default;
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  // The bucket is packed. Every rank starts the same reductions in the same order.
  virtual void start(bucket::Bucket& bucket) = 0;
  // Whether finish() would not wait.
  virtual bool poll() = 0;
  // When it returns, the averages are in the bucket.
  virtual void finish(bucket::Bucket& bucket) = 0;
  // Forgets what is under way.
  virtual void abandon() noexcept = 0;

  // Whether the bytes go where no transport of ours counts them.
  virtual bool goes_unseen() const { return false; }
  // The bucket's one gradient lies where it was made: whether the reduction will count what is not finite in it, and note that.
  virtual bool counts_non_finite(const bucket::Bucket& /*bucket*/) { return false; }
  // Whether the averages of the reduction that has just been finished are known to be finite.
  virtual bool is_known_finite() { return false; }
};

}  // namespace torchddp::reducer
