// The parts of a reducer, in order of dependency. Each can be configured and queried without the Reducer.
#pragma once

#include "reducer/base/context.h"
#include "reducer/base/grad_marks.h"
#include "reducer/base/step.h"
#include "reducer/graph/used_params.h"
#include "reducer/launch_queue.h"
#include "reducer/pack/hand_back.h"
#include "reducer/pack/pack_rules.h"
#include "reducer/pack/packers.h"
#include "reducer/plan_keeper.h"
#include "reducer/reduce/layout.h"
#include "reducer/reduce/reductions.h"
#include "reducer/report/events.h"
#include "reducer/report/non_finite.h"
#include "reducer/weights.h"

namespace torchddp::reducer {

struct Parts {
  Parts(std::vector<at::Tensor> params, std::vector<plan::ParamSpec> specs,
        c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<transport::Transport> transport,
        ReducerConfig config)
      : context(std::move(params), std::move(specs), std::move(group), std::move(transport), std::move(config)) {}

  Context context;
  Step step{context.params.size()};
  StepEvents events{context};
  NonFiniteWatch non_finite{context, events};
  StaticGraph static_graph{context};
  UsedParams used{context, static_graph, events};
  CommHook hook;
  Reductions reductions{context, hook, non_finite, events};
  GradMarks marks{context};
  BucketLayout layout{context, reductions, marks};
  OwnAverages own_averages{context, step, layout, used, marks};
  PackedGrads packed{context};
  Packers packers{context, step, layout, non_finite, packed, used};
  Divisor divisor{context, hook, events};
  Weights weights{context, divisor, events, step, marks};
  LaunchQueue queue{*this};
  HandBack hand_back{context, layout, packed, used};
  PlanKeeper keeper{*this};
  QueuedFutures futures{context, events};
  GradientChanges changes{context};
};

}  // namespace torchddp::reducer
