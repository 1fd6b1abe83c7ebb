// Which way each bucket is reduced.
#pragma once

#include <memory>

#include "reducer/base/context.h"
#include "reducer/reduce/comm_hook.h"
#include "reducer/reduce/reduction.h"
#include "reducer/report/events.h"
#include "reducer/report/non_finite_watch.h"

namespace torchddp::reducer {

// Makes them. A new way of reducing is one file beside this one, and one line in make().
class Reductions {
 public:
  Reductions(const Context& context, const CommHook& hook, NonFiniteWatch& non_finite, const StepEvents& events)
      : context_(context), hook_(hook), non_finite_(non_finite), events_(events) {}

  // For bucket `index` of `count`.
  std::unique_ptr<Reduction> make(const bucket::Bucket& bucket, int64_t index, int64_t count) const;

 private:
  const Context& context_;
  const CommHook& hook_;
  NonFiniteWatch& non_finite_;
  const StepEvents& events_;
};

}  // namespace torchddp::reducer
