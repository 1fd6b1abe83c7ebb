// How buckets are reduced. Each way is a class; Reductions chooses.
#pragma once

#include <memory>

#include "bucket/bucket.h"
#include "reducer/base/context.h"
#include "reducer/reduce/comm_hook.h"
#include "reducer/report/events.h"
#include "reducer/report/non_finite.h"

namespace torchddp::reducer {

// One per bucket, holding all state of its reduction. start() and poll() are called under the queue's lock, one operation at a
// time. Errors are TransportErrors.
//
// A bucket that is reduced in the program's memory comes with a factor that is still to be applied. start() does so, unless
// the transport can while it sums (`Scaling::kInFlight`).
class Reduction {
 public:
  // When a factor is applied.
  enum class Scaling : uint8_t { kBefore, kInFlight };

  explicit Reduction(Scaling scaling) : scaling_(scaling) {}
  virtual ~Reduction() = default;
  Reduction& operator=(Reduction&&) = delete;

  // The bucket is packed. Every rank starts the same reductions in the same order.
  void start(bucket::Bucket& bucket);
  // Whether finish() would return without waiting.
  virtual bool poll() = 0;
  // On return, the averages are in the bucket.
  virtual void finish(bucket::Bucket& bucket) = 0;
  // Forgets the operation in flight.
  virtual void abandon() noexcept = 0;

  // Whether the bytes bypass our transports, so that nothing counts them.
  virtual bool hides_operation() const { return false; }
  // Whether the reduction will count the non-finite values of the bucket's only gradient, which is reduced in place.
  virtual bool counts_non_finite(const bucket::Bucket& /*bucket*/) { return false; }
  // Whether the averages of the reduction that just finished are known to be finite.
  virtual bool is_known_finite() { return false; }

 private:
  // `scale`: what the sums are multiplied by; 1 unless kInFlight.
  virtual void begin(bucket::Bucket& bucket, double scale) = 0;

  const Scaling scaling_;
};

using ReductionPtr = std::unique_ptr<Reduction>;

// The factory. A new way of reducing is a class in reductions.cpp, or in a file beside it with a function below, and one line
// in make().
class Reductions {
 public:
  Reductions(const Context& context, const CommHook& hook, NonFiniteWatch& non_finite, const StepEvents& events)
      : context_(context), hook_(hook), non_finite_(non_finite), events_(events) {}

  // The size from which gradients are reduced in place (Note [Adopted gradients] in bucket/grad_slot.h); 0: none are. A
  // communication hook always gets the whole bucket in one piece.
  int64_t in_place_bytes() const;
  // For bucket `index` of `count`.
  ReductionPtr make(const bucket::Bucket& bucket, int64_t index, int64_t count) const;

 private:
  const Context& context_;
  const CommHook& hook_;
  NonFiniteWatch& non_finite_;
  const StepEvents& events_;
};

ReductionPtr make_hook_reduction(const Context& context, const CommHook& hook, const StepEvents& events, int64_t index,
                                 int64_t count);

// The options for the all-reduce of bucket `index`, which must be the same on every rank, including one without gradients.
transport::SumOptions all_reduce_options(const Context& context, int64_t index);

}  // namespace torchddp::reducer
