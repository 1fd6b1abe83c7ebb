// The Reducer: packs gradients into buckets as autograd produces them, reduces the buckets meanwhile, and hands the averages back.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "reducer/graph/grad_hooks.h"
#include "reducer/parts.h"

namespace torchddp::reducer {

// Note [A step]
//   begin_forward        checks that the last step finished; Python then rebuilds buckets once, by the measured ready order
//   prepare_for_backward arms the hooks (not under no_sync) and looks for unused parameters
//   on_grad_ready        per parameter: pack into the bucket, point param.grad at it; the bucket's last gradient launches it
//   finalize             at the end of backward: wait for each bucket, copy out what is no view
// An exception in any of them leaves the reducer idle (abandon), so that the process can go on.
//
// Note [Threads]
// on_grad_ready is called by autograd threads, several at once when a model spans devices: per-parameter state is touched by
// its own hook only, a bucket counts arrivals atomically, and launching takes the queue's lock once a bucket. All other calls come
// from the training thread, without the GIL.
class Reducer final : public GradSink, public std::enable_shared_from_this<Reducer> {
 public:
  // Collective if the transport may lose memory. `params`: leaves that require grad; `specs`: one each, in the same order.
  Reducer(std::vector<at::Tensor> params, std::vector<plan::ParamSpec> specs,
          c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<transport::Transport> transport,
          ReducerConfig config);

  // --- a step ---
  // True if a step was begun before this one, and no gradient has come in it.
  bool begin_forward();
  void prepare_for_backward(std::span<const at::Tensor> outputs);
  // What the next backward counts for: see Weights::announce.
  void weigh(double weight, double count, bool goes_on);
  void on_grad_coming(int64_t param, at::Tensor& incoming) override;
  void on_grad_ready(int64_t param, const at::Tensor* incoming) override;
  // The end of the first synchronised backward of a static graph: nothing was reduced before it.
  void delay_all_reduce();
  // Collective: reduces what gradients there are, without a backward. A gradient that a rank has not counts as zero there. Those of
  // parameters that no rank has used since the last reduction stay as they are, where the ranks search for unused parameters.
  void reduce_now();
  // RuntimeError, with the gradients that are missing, if the last synchronised forward was not followed by all of its backward.
  void check_finalized();
  // The same, but a forward without any backward is none.
  void check_not_unfinished();

  // --- between steps ---
  // See PlanKeeper.
  bool rebuild_buckets();
  bool adopt_plan(const std::optional<plan::BucketPlan>& wanted);
  void set_static_graph();
  // `install` puts a communication hook into place, which reduces all buckets from then on.
  template <typename Install>
  void set_hook(Install&& install) {
    install(parts_.hook);
    parts_.layout.adapt();
  }
  // Another reducer averages the same gradients: from the next step on they keep memory of their own, and nothing is reduced in it.
  void share_gradients();
  void remove_autograd_hooks() { hooks_->remove(); }
  // For good: without hooks and buckets. What it has counted can be read, and taken over.
  void close();
  // Goes on where a closed reducer has stopped, whose parameters may be others: steps, gradients of no_sync, a forward without its
  // backward yet.
  void take_over(const Reducer& before);
  // Collective if the transport may lose memory.
  void update_process_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                            std::shared_ptr<transport::Transport> transport);
  void reset_state();

  // For what concerns one part alone: its modes, and what it has to report.
  Parts& parts() { return parts_; }
  // From any thread, at any time; waits for nothing.
  Status status() const;

 private:
  void check_compiled_autograd() const override;
  void begin_step();
  void arm();
  void begin_backward();
  void take_main_grad(int64_t param);
  void arrive(int64_t param, Mark mark, const at::Tensor* incoming);
  template <typename IsUsed>
  void pack_all(IsUsed&& is_used);
  void finalize();
  void abandon();
  template <typename Body>
  void guarded(Body&& body);

  Parts parts_;
  std::unique_ptr<GradHooks> hooks_;
};

}  // namespace torchddp::reducer
