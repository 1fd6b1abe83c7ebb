// Chooses how each bucket is reduced.
#pragma once

#include <memory>

#include "reducer/base/context.h"
#include "reducer/reduce/comm_hook.h"
#include "reducer/reduce/reduction.h"
#include "reducer/report/events.h"
#include "reducer/report/non_finite_watch.h"

namespace torchddp::reducer {

using ReductionPtr = std::unique_ptr<Reduction>;

// The factory. A new way of reducing is a file beside this one, a function below, and one line in make().
class Reductions {
 public:
  Reductions(const Context& context, const CommHook& hook, NonFiniteWatch& non_finite, const StepEvents& events)
      : context_(context), hook_(hook), non_finite_(non_finite), events_(events) {}

  // The size from which gradients are reduced where they lie (Note [Adopted gradients] in bucket/grad_slot.h); 0: none are. A
  // communication hook always gets the whole bucket in one piece.
  int64_t apart_bytes() const;
  // For bucket `index` of `count`.
  ReductionPtr make(const bucket::Bucket& bucket, int64_t index, int64_t count) const;

 private:
  const Context& context_;
  const CommHook& hook_;
  NonFiniteWatch& non_finite_;
  const StepEvents& events_;
};

ReductionPtr make_all_reduce(const Context& context, NonFiniteWatch& non_finite, int64_t index);
ReductionPtr make_hook_reduction(const Context& context, const CommHook& hook, const StepEvents& events, int64_t index,
                                 int64_t count);
ReductionPtr make_sparse_reduction(const Context& context);
ReductionPtr make_reduction_to_owner(const Context& context, int64_t index);

// The options for the all-reduce of bucket `index`, which must be the same on every rank, including one without gradients.
transport::SumOptions all_reduce_options(const Context& context, int64_t index);

}  // namespace torchddp::reducer
