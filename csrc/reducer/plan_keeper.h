// Which plan the buckets follow: the first, by registration; once, by the order in which gradients have come; or one that was asked for.
#pragma once

#include <optional>
#include <vector>

#include "plan/bucket_plan.h"
#include "reducer/base/context.h"
#include "reducer/graph/used_params.h"
#include "reducer/reduce/layout.h"
#include "reducer/report/events.h"

namespace torchddp::reducer {

// Calls come from the training thread, between steps.
class PlanKeeper {
 public:
  PlanKeeper(Context& context, BucketLayout& layout, UsedParams& used, const StepEvents& events)
      : context_(context), layout_(layout), used_(used), events_(events) {}

  // Collective if the transport may lose memory.
  void lay_out_first();
  // Collective when it returns true: new buckets by the measured order. Once, after the first measured step.
  bool rebuild();
  // Collective: rank 0's plan, or the one in use if it wants none; whether buckets changed. They are not rebuilt after.
  bool adopt(const std::optional<plan::BucketPlan>& wanted);
  // Collective if the transport may lose memory: the buckets are in its memory from here on.
  void use(std::shared_ptr<transport::Transport> transport);

  // Takes the order in which the gradients of a step have come, if it is the first.
  void measure(const Step& step);
  // In the place of a measured one.
  void take_reverse_order();
  void forget();
  // If a step becomes part of a CUDA graph, which then holds the addresses of the buckets, these stay for good.
  void note_capture() { in_graph_ = in_graph_ || context_.is_captured(); }

  bool is_in_graph() const { return in_graph_; }
  bool has_rebuilt() const { return has_rebuilt_; }

 private:
  bool should_rebuild() const { return !has_rebuilt_ && !in_graph_; }
  bool switch_to(const plan::BucketPlan& mine);
  void change_transport(std::shared_ptr<transport::Transport> transport);
  void agree_on_memory();

  Context& context_;
  BucketLayout& layout_;
  UsedParams& used_;
  const StepEvents& events_;
  bool has_rebuilt_ = false;
  bool in_graph_ = false;
  std::vector<int64_t> measured_order_;
};

}  // namespace torchddp::reducer
