// Under join(): a rank that has run out of inputs takes part in the reductions of the others.
#pragma once

#include <vector>

#include "reducer/base/context.h"
#include "reducer/reduce/comm_hook.h"
#include "reducer/reduce/layout.h"
#include "reducer/report/events.h"

namespace torchddp::reducer {

class JoinShadow {
 public:
  JoinShadow(const Context& context, const BucketLayout& layout, const CommHook& hook, const StepEvents& events)
      : context_(context), layout_(layout), hook_(hook), events_(events) {}

  // The contribution of such a rank to each bucket.
  std::vector<c10d::GradBucket> zero_buckets() const;
  // Collective: reduces the bucket as the other ranks do. Without a hook the result is ready on return.
  c10::intrusive_ptr<c10::ivalue::Future> reduce(c10d::GradBucket& bucket) const;
  c10::intrusive_ptr<c10::ivalue::Future> all_reduce(c10d::GradBucket& bucket) const;

 private:
  const Context& context_;
  const BucketLayout& layout_;
  const CommHook& hook_;
  const StepEvents& events_;
};

}  // namespace torchddp::reducer
