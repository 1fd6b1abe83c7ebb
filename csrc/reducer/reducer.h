// The Reducer packs gradients into buckets as autograd produces them, reduces the buckets meanwhile, and hands back the
// averages.
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/check.h"
#include "reducer/graph/grad_hooks.h"
#include "reducer/parts.h"

namespace torchddp::reducer {

// Note [Threads]
// Autograd threads call on_grad_ready, concurrently when a model spans devices. Per-parameter state is only touched by its own
// hook, a bucket counts arrivals atomically, and launching takes the queue's lock once per bucket. All other calls come from
// the training thread, without the GIL.
class Reducer final : public GradSink, public std::enable_shared_from_this<Reducer> {
 public:
  // `params`: leaves that require grad; `specs`: one for each, in the same order. Collective if the transport may lose memory.
  Reducer(std::vector<at::Tensor> params, std::vector<plan::ParamSpec> specs,
          c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<transport::Transport> transport,
          ReducerConfig config);

  // --- a step. An exception in it leaves the reducer idle (abandon), so that the process can continue. ---
  // Checks that the last step finished. True if a step was begun before this one, and no gradient has come in it.
  bool begin_forward();
  // Arms the hooks and looks for unused parameters. `has_hooks`: a module has backward hooks, see Note [Gradients during
  // backward] in pack/pack_rules.h.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs, bool has_hooks);
  // Sets the weight of the next backward: see Weights::announce.
  void weigh(double weight, double count, bool begins, bool ends) {
    hooks_->call_before();
    if (!begins && !parts_.weights.is_open()) parts_.used.resume();
    parts_.weights.announce(weight, count, begins, ends);
  }
  void before_accumulation(int64_t param, at::Tensor& incoming) override;
  void on_grad_ready(int64_t param, const at::Tensor* incoming) override;
  // The end of a static graph's first synchronized backward, which has reduced nothing yet.
  void delay_all_reduce();
  // Collective: reduces the existing gradients without a backward. A gradient that a rank lacks counts as zero. If the ranks
  // search for unused parameters, gradients of those that no rank has used since the last reduction stay as they are.
  void reduce_now();
  // Collective: the part of a rank that has run out of inputs (join), in a step of the others.
  void match_step();
  // Collective: such a rank reduces a hook's bucket as the other ranks do without a hook. The result is ready on return.
  FuturePtr all_reduce_as_others(c10d::GradBucket& bucket) const;
  // RuntimeError, naming the missing gradients, if the backward of the last synchronized forward did not complete.
  void check_finalized() {
    check_not_unfinished();
    TDDP_CHECK(!parts_.step.armed(), "Expected to have finished reduction: the last synchronized forward on rank ",
               parts_.context.rank(),
               " was not followed by a backward that reached every bucket. Call backward() on its output first.");
  }
  // The same, but a forward without any backward is not an error.
  void check_not_unfinished();

  // --- between steps ---
  // See PlanKeeper.
  bool rebuild_buckets();
  bool adopt_plan(const std::optional<plan::BucketPlan>& wanted) {
    check_finalized();
    return parts_.keeper.adopt(wanted);
  }
  void set_static_graph();
  // Of this backward, which calls delay_all_reduce() at its end.
  void meet_sink(bool all_outputs_used) {
    ends_unseen_ = false;
    if (!all_outputs_used) parts_.static_graph.note_unused_outputs();
  }
  // `install` installs a communication hook, which reduces all buckets from then on.
  template <typename Install>
  void set_hook(Install&& install) {
    install(parts_.hook);
    parts_.layout.adapt();
  }
  // Another reducer averages the same gradients: from the next backward on they keep their own memory, and nothing is reduced
  // in place. RuntimeError for gradients that only live in buckets.
  void share_gradients();
  void remove_autograd_hooks() { hooks_->remove(); }
  // Final: removes hooks and buckets. Counters stay readable and can be taken over.
  void close() {
    remove_autograd_hooks();
    parts_.layout.clear();
  }
  // Continues where a closed reducer stopped, possibly with other parameters: step count, gradients of no_sync, a forward still
  // without its backward.
  void take_over(const Reducer& before);
  // Collective if the transport may lose memory.
  void update_process_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                            std::shared_ptr<transport::Transport> transport) {
    parts_.context.group = std::move(group);
    parts_.weights.forget_total();
    parts_.keeper.use(std::move(transport));
  }
  void reset_state() {
    abandon();
    parts_.keeper.forget();
    if (parts_.static_graph.enabled()) parts_.static_graph.enable();
  }

  // For calls that concern a single part: its modes and reports.
  Parts& parts() { return parts_; }
  // Thread-safe at any time; never waits.
  Status status() const {
    auto status = parts_.events.live().read();
    parts_.layout.describe(status, parts_.step);
    return status;
  }

 private:
  void check_compiled_autograd() const override {
    TDDP_CHECK(parts_.context.config.compiled_autograd_takes_over,
               "Compiled autograd is not compatible with C++ DDP Reducer, please use ",
               "torch._dynamo.config.optimize_ddp=\"python_reducer\".");
  }
  void begin_step() {
    parts_.layout.begin_step();
    parts_.packers.begin_step();
    parts_.queue.begin_step();
    parts_.step.clear();
    parts_.non_finite.begin_step();
    parts_.own_averages.begin_step();
    parts_.static_graph.begin_step();
    parts_.context.rpc.reset();
  }
  void arm() {
    parts_.step.arm();
    parts_.context.transport->begin_backward();
  }
  void begin_backward();
  bool take_main_grad(int64_t param);
  void arrive(int64_t param, Mark mark, const at::Tensor* incoming);
  void queue_finalize();
  // In a step of the others that this rank doesn't measure. They don't measure the one in which they record a static graph.
  void follow_measurement() {
    if (!parts_.static_graph.all_record()) parts_.keeper.take_reverse_order();
  }
  void take_part();
  template <typename IsUsed>
  void pack_all(IsUsed&& is_used);
  void finalize();
  void abandon();
  [[noreturn]] void fail(const std::string& text) {
    parts_.events.live().set_error(text);
    throw std::runtime_error(text);
  }
  template <typename Body>
  void guarded(Body&& body);

  Parts parts_;
  std::unique_ptr<GradHooks> hooks_;
  bool ends_unseen_ = false;  // after autograd.grad(), a loss may lead past the outputs, whose sink ends the recording
};

}  // namespace torchddp::reducer
