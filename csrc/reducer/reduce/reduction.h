// How one bucket is reduced. Each way is a class; Reductions chooses.
#pragma once

#include "bucket/bucket.h"

namespace torchddp::reducer {

// One per bucket, holding all state of its reduction. start() and poll() are called under the queue's lock, one operation at a
// time. Errors are TransportErrors.
class Reduction {
 public:
  virtual ~Reduction() = default;
  Reduction() = default;
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  // The bucket is packed. Every rank starts the same reductions in the same order.
  virtual void start(bucket::Bucket& bucket) = 0;
  // Whether finish() would return without waiting.
  virtual bool poll() = 0;
  // On return, the averages are in the bucket.
  virtual void finish(bucket::Bucket& bucket) = 0;
  // Forgets the operation in flight.
  virtual void abandon() noexcept = 0;

  // Whether the bytes bypass our transports, so that nothing counts them.
  virtual bool goes_unseen() const { return false; }
  // Whether the reduction will count the non-finite values of the bucket's only gradient, which is reduced in place.
  virtual bool counts_non_finite(const bucket::Bucket& /*bucket*/) { return false; }
  // Whether the averages of the reduction that just finished are known to be finite.
  virtual bool is_known_finite() { return false; }
};

}  // namespace torchddp::reducer
