// Chooses the plan: first by registration order, then once by measured gradient order, or as requested by the caller.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "plan/bucket_plan.h"
#include "reducer/base/step.h"
#include "transport/transport.h"

namespace torchddp::reducer {

struct Parts;

// Called by the training thread, between steps.
class PlanKeeper {
 public:
  explicit PlanKeeper(Parts& parts) : parts_(parts) {}

  // Collective if the transport may lose memory.
  void lay_out_first();
  // Lays out buckets by the measured order, once, after the first measured step. Collective if it returns true.
  bool rebuild();
  // Collective: adopts rank 0's plan, or keeps the current one if rank 0 wants none. Returns whether buckets changed. They are
  // not rebuilt after this.
  bool adopt(const std::optional<plan::BucketPlan>& wanted);
  // Moves the buckets to the memory of another transport. Collective if the transport may lose memory.
  void use(std::shared_ptr<transport::Transport> transport);

  // Records the order in which gradients arrived, if this is the first such step.
  void measure(const Step& step);
  // Uses reverse registration order instead of a measured one.
  void take_reverse_order();
  void forget() {
    has_rebuilt_ = false;
    measured_order_.clear();
  }
  // A CUDA graph that captured a step holds the buckets' addresses, so from then on the buckets stay.
  void note_capture();

  bool is_in_graph() const { return in_graph_; }
  bool has_rebuilt() const { return has_rebuilt_; }

 private:
  bool should_rebuild() const { return !has_rebuilt_ && !in_graph_; }
  bool switch_to(const plan::BucketPlan& mine);
  void change_transport(std::shared_ptr<transport::Transport> transport);
  void agree_on_memory();

  Parts& parts_;
  bool has_rebuilt_ = false;
  bool in_graph_ = false;
  std::vector<int64_t> measured_order_;
};

}  // namespace torchddp::reducer
