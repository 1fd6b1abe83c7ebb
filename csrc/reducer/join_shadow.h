// Under join(): a rank that has run out of inputs takes part in the reductions of the others.
#pragma once

#include <memory>

#include "reducer/base/context.h"
#include "reducer/graph/used_params.h"
#include "reducer/reduce/comm_hook.h"
#include "reducer/reduce/layout.h"
#include "reducer/report/events.h"
#include "reducer/weights.h"

namespace torchddp::reducer {

class JoinShadow {
 public:
  JoinShadow(const Context& context, const BucketLayout& layout, const CommHook& hook, StaticGraph& static_graph,
             UsedParams& used, Weights& weights, const StepEvents& events)
      : context_(context),
        layout_(layout),
        hook_(hook),
        static_graph_(static_graph),
        used_(used),
        weights_(weights),
        events_(events) {}

  // Collective: the part of such a rank in a step, with zeros. Like the others it waits only once everything has started: what
  // it waited for before might need a rank that waits for something later. Throws what the step throws on all ranks.
  void take_part();
  // Collective: reduces the bucket as the other ranks do without a hook. The result is ready on return.
  c10::intrusive_ptr<c10::ivalue::Future> all_reduce(c10d::GradBucket& bucket) const;

 private:
  std::unique_ptr<transport::Work> start(int64_t index, const at::Tensor& buffer) const;

  const Context& context_;
  const BucketLayout& layout_;
  const CommHook& hook_;
  StaticGraph& static_graph_;
  UsedParams& used_;
  Weights& weights_;
  const StepEvents& events_;
};

}  // namespace torchddp::reducer
