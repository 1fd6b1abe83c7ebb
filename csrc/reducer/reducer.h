// The Reducer: packs gradients into buckets as autograd produces them, reduces the buckets meanwhile, and hands the averages back.
#pragma once

#include <torch/csrc/distributed/autograd/context/context.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "bucket/bucket.h"
#include "bucket/gather.h"
#include "bucket/lent_memory.h"
#include "common/errors.h"
#include "gpu/ready_clock.h"
#include "reducer/comm_hook.h"
#include "reducer/grad_hooks.h"
#include "reducer/non_finite_log.h"
#include "reducer/sparse_grad.h"
#include "reducer/static_graph.h"
#include "reducer/status.h"
#include "reducer/step_stats.h"
#include "reducer/unused_params.h"
#include "timeline/timeline.h"
#include "transport/transport.h"

namespace torchddp::reducer {

struct ReducerConfig {
  plan::BucketLimits limits;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = true;
  // Whose storage views have: see Note [Gradients that the program keeps] in bucket/grad_slot.h.
  bucket::ViewStorage view_storage = bucket::ViewStorage::kOwn;
  bool skip_all_reduce_unused_params = false;
  bool compiled_autograd_takes_over = false;  // torch's "python_reducer" mode
  std::optional<at::ScalarType> wire_dtype;   // fp32 buckets travel in it
  // Buckets that have an owner, if they are fp32: cast to this before they are reduced, and back where they are kept.
  std::optional<at::ScalarType> reduce_dtype;
  bool gradient_stats = false;      // measure every bucket once it is reduced
  bool find_non_finite = false;     // look at this rank's own gradients before they are averaged
  bool raise_non_finite = false;    // ... and at the averages: see Note [Non-finite averages] in reducer_non_finite.cpp
  bool pack_whole_buckets = false;  // pack a bucket when it is complete, on the CPU too, as on other devices
  std::chrono::milliseconds timeout = transport::kTransportTimeout;
};

// Note [A step]
//   begin_forward        checks that the last step finished; Python then rebuilds buckets once, by the measured ready order
//   prepare_for_backward arms the hooks (not under no_sync) and looks for unused parameters
//   on_grad_ready        per parameter: pack into the bucket, point param.grad at it; the bucket's last gradient launches it
//   finalize             at the end of backward: wait for each bucket, copy out what is no view
// An exception in any of them leaves the reducer idle (abandon_step), so that the process can go on.
//
// Note [Threads]
// on_grad_ready is called by autograd threads, several at once when a model spans devices: per-parameter state is touched by
// its own hook only, a bucket counts arrivals atomically, and launching takes launch_mutex_ once a bucket. All other calls come
// from the training thread, without the GIL.
class Reducer final : public GradSink, public std::enable_shared_from_this<Reducer> {
 public:
  // Collective if the transport may lose memory. `params`: leaves that require grad; `specs`: one each, in the same order.
  Reducer(std::vector<at::Tensor> params, std::vector<plan::ParamSpec> specs,
          c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<transport::Transport> transport,
          ReducerConfig config);
  ~Reducer();

  // --- a step ---
  // True if a step was begun before this one, and no gradient has come in it.
  bool begin_forward();
  void prepare_for_backward(std::span<const at::Tensor> outputs);
  void on_grad_coming(int64_t param) override;
  void on_grad_ready(int64_t param, const at::Tensor* incoming) override;
  void check_compiled_autograd() const override;
  // The end of the first synchronised backward of a static graph: nothing was reduced before it.
  void delay_all_reduce();
  // Collective: reduces what gradients there are, without a backward. A gradient that a rank has not counts as zero there. Those of
  // parameters that no rank has used since the last reduction stay as they are, where the ranks search for unused parameters.
  void reduce_now();
  // RuntimeError, with the gradients that are missing, if the last synchronised forward was not followed by all of its backward.
  void check_finalized();

  // --- buckets ---
  // Collective when it returns true: new buckets by the measured order. Once, after the first measured step.
  bool rebuild_buckets();
  // Collective, between steps: rank 0's plan, or the one in use if it wants none; whether buckets changed. They are not rebuilt after.
  bool adopt_plan(const std::optional<plan::BucketPlan>& wanted);
  void push_rebuilt_params_for_all_indices();
  const plan::BucketPlan& plan() const { return plan_; }
  // How often buckets were laid out.
  int64_t num_layouts() const { return num_layouts_; }
  // Whether a captured CUDA graph holds the buckets, which therefore stay for good.
  bool is_in_graph() const { return is_in_graph_; }
  bool has_rebuilt_buckets() const { return has_rebuilt_; }
  std::vector<c10d::GradBucket> zero_grad_buckets();

  // --- measuring ---
  // Off: no bucket is launched before the last gradient is there, so that ready times are those of the computation alone,
  // and the time after them is that of communication alone. Results are the same. Every rank must choose alike.
  void set_overlap(bool overlap) { overlap_ = overlap; }
  // Keep ready times, as the timeline does, without its events; on a CUDA device by the device's clock.
  void record_ready_times(bool record);
  // Of the last recorded step, from the begin of forward to the first gradient; by the device's clock where ready times are.
  int64_t forward_ns() const;

  // --- set-up and special modes, as torch's DDP calls them ---
  void set_static_graph();
  void register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  void register_builtin_comm_hook(c10d::BuiltinCommHookType type);
  c10::intrusive_ptr<c10::ivalue::Future> run_comm_hook(c10d::GradBucket& bucket);
  c10::intrusive_ptr<c10::ivalue::Future> run_allreduce_hook(c10d::GradBucket& bucket);
  void install_futures(const c10::List<c10::intrusive_ptr<c10::ivalue::Future>>& futures);
  void set_forward_pass_work_handle(c10::intrusive_ptr<c10d::Work> work, bool use_static_world_size);
  // How many ranks take part in a step, asked once in each backward that reduces: for groups that change between steps.
  void set_divisor(std::function<int64_t()> divisor) { divisor_ = std::move(divisor); }
  void set_optimizer_in_backward() { optimizer_in_backward_ = true; }
  void set_mixed_precision_param_dtype(at::ScalarType dtype) { mixed_precision_dtype_ = dtype; }
  void set_sparse_metadata(SparseMetadata metadata) { sparse_metadata_ = std::move(metadata); }
  // Gradients keep memory of their own from the next step on.
  void disable_views() { views_ = false; }
  bool gradient_as_bucket_view() const { return views_; }
  void remove_autograd_hooks() { hooks_->remove(); }
  // Collective if the transport may lose memory.
  void update_process_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                            std::shared_ptr<transport::Transport> transport);
  // For a rank without inputs: takes part in the reduction of used parameters, with none.
  void match_used_map();
  void reset_state();

  // Of the last synchronised backward: a row a bucket, see bucket::Bucket::measure; float64, on the parameters' device.
  const at::Tensor& gradient_stats() const;

  // What NonFiniteLog::episode and version tell; nothing unless they are looked for. From any thread.
  std::vector<NonFiniteGrad> non_finite();
  int64_t non_finite_version();

  // Per parameter: whether its gradient is an average that this rank alone has; to be handed to the reducer that takes over.
  const std::vector<uint8_t>& averages() const { return reduced_; }
  void set_averages(std::vector<uint8_t> averages);

  // --- for reports ---
  at::Tensor local_used_map();
  bool graph_has_been_static() const { return graph_static_; }
  const StepStats& stats() const { return stats_; }
  // What the last failed step or check said; empty if none failed.
  std::string last_error() const { return live_->error(); }
  // From any thread, at any time; waits for nothing.
  Status status() const;
  // For the training thread's own waits that this reducer does not see.
  LiveStatus& live_status() { return *live_; }
  const std::vector<plan::ParamSpec>& specs() const { return specs_; }
  std::vector<int64_t> grad_ready_order() const;
  std::vector<int64_t> backward_stats() const;
  int64_t unused_bytes() const;
  timeline::Timeline& timeline() { return timeline_; }
  void enable_timeline(int64_t capacity);
  const std::shared_ptr<transport::Transport>& transport() const { return transport_; }
  int64_t bucket_memory_bytes() const;

 private:
  struct Place {  // where a parameter's gradient goes
    bucket::GradSlot* slot = nullptr;
    bucket::Bucket* bucket = nullptr;
    int64_t bucket_index = 0;
  };
  struct Late {  // gradients that finalize must look at
    int64_t param;
    at::Tensor saved;  // what to go back to if nobody used the parameter
  };

  bool dynamic_find_unused() const { return config_.find_unused_parameters && !static_graph_.enabled(); }
  bool keeps_apart() const { return config_.view_storage == bucket::ViewStorage::kOwn; }
  // Some gradients have arrived, others have not.
  bool is_unfinished() const {
    return incomplete_.load(std::memory_order_acquire) && armed_.load(std::memory_order_acquire);
  }
  bool should_rebuild() const { return !has_rebuilt_ && !is_in_graph_; }

  void clear_step();
  void arm();
  void begin_backward();
  void note_backward_begin();
  void fire(int64_t param, const at::Tensor* incoming);
  void mark_ready(int64_t param, bool unused, const at::Tensor* incoming);
  void pack(int64_t param, bool unused, const at::Tensor* incoming);
  void pack_grad(int64_t param, at::Tensor& grad, bool unused, const at::Tensor* incoming);
  void leave_to_holders(const Place& place);
  void leave_to_holders(bucket::Bucket& bucket);
  void add_late(int64_t param, at::Tensor saved = {});
  void copy_into(int64_t param, bucket::GradSlot& slot, const at::Tensor& grad);
  void pack_sparse(int64_t param, bool unused);
  void launch_all();
  // reducer_owned.cpp
  void check_owners() const;
  bool gives_away(const bucket::Bucket& bucket) const;
  void pack_given_away(int64_t param, at::Tensor& grad, const at::Tensor* incoming);
  // Under launch_mutex_.
  void lend_memory(bucket::Bucket& bucket);
  void start_reduce(int64_t index);
  void finish_owned(bucket::Bucket& bucket);
  void let_go(bucket::Bucket& bucket);
  void let_go_of_finished();
  void keep_average(int64_t param, at::Tensor& grad);
  void finish_averages();
  // reducer_non_finite.cpp
  void look_at(int64_t param, const at::Tensor& grad);
  void look_in_flight(int64_t param, const at::Tensor& grad);
  void collect_in_flight(bucket::Bucket& bucket);
  bool sums_tell(const bucket::Bucket& bucket) const;
  void look_at_average(int64_t index);
  void raise_non_finite();
  // reducer_device.cpp
  bool packs_whole_buckets() const;
  void note_stream(bucket::Bucket& bucket);
  void follow_packing(const bucket::Bucket& bucket);
  // `incoming`: of the gradient `last`, whose hook it is.
  void pack_whole_bucket(bucket::Bucket& bucket, int64_t last = -1, const at::Tensor* incoming = nullptr);
  bool becomes_view(const at::Tensor& grad, bool unused, const at::Tensor* incoming) const;
  bool is_captured();
  void note_capture() { is_in_graph_ = is_in_graph_ || is_captured(); }
  void scale_slot(const Place& place);
  static void warn_create_graph();
  void check_grad(int64_t param, const at::Tensor& grad) const;
  // Whether all buckets are launched now.
  bool bucket_ready(int64_t index, int64_t last = -1, const at::Tensor* incoming = nullptr);
  void launch(int64_t index);
  void start_reduction(int64_t index);
  // Of a bucket's all-reduce, also by a rank that takes part without inputs: on the wire it must be the same on all.
  transport::SumOptions sum_options(int64_t index) const;
  bool can_skip(const bucket::Bucket& bucket) const;
  void all_launched();
  void finalize();
  void finish_used_map();
  void wait_for_future(c10::ivalue::Future& future, const char* what);
  void wait_bucket(int64_t index);
  void hand_back(int64_t index);
  void finish_bucket(int64_t index);
  // `scatter`, if there is one, does the copying later.
  void finish_grad(int64_t param, at::Tensor& grad, bucket::Scatter* scatter);
  void finish_late(const Late& late);
  bool keeps_grad(int64_t param);
  void abandon_step();
  [[noreturn]] void fail(const TransportError& error, int64_t bucket);
  void apply_plan(plan::BucketPlan plan);
  bool switch_to(const plan::BucketPlan& mine);
  void use_transport(std::shared_ptr<transport::Transport> transport);
  void agree_on_memory();
  void expect_gradients();
  [[noreturn]] void raise_unfinished();
  double gradient_scale();
  template <typename Callback>
  void with_grad(int64_t param, Callback&& callback);
  template <typename Body>
  void guarded(Body&& body);

  const std::vector<at::Tensor> params_;
  const std::vector<plan::ParamSpec> specs_;
  const ReducerConfig config_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<transport::Transport> transport_;
  std::shared_ptr<gpu::Device> device_;  // null for models that are on no CUDA device, or on several
  gpu::Event fork_ = nullptr;            // used under launch_mutex_

  // Buckets and the way from a parameter to its slot.
  plan::BucketPlan plan_;
  std::vector<std::unique_ptr<bucket::Bucket>> buckets_;
  std::vector<Place> places_;
  std::vector<SparseGrad> sparse_;  // by bucket
  int64_t num_layouts_ = 0;
  const bool owned_;         // buckets have owners
  bucket::LentMemory lent_;  // for those of other ranks
  bool has_rebuilt_ = false;
  bool is_in_graph_ = false;         // a captured graph holds the addresses of the buckets: they must stay
  bool needs_fresh_memory_ = false;  // a failed operation may still write to the buckets
  std::vector<int64_t> measured_order_;

  // The step under way.
  std::atomic<bool> armed_{false};       // hooks reduce
  std::atomic<bool> begun_{false};       // the first hook of this backward has run
  std::atomic<bool> incomplete_{false};  // some gradient is marked, finalize has not run
  std::unique_ptr<std::atomic<uint8_t>[]> marked_;
  std::vector<int64_t> ready_order_;
  int64_t backward_begin_steady_ns_ = 0;
  bool records_ready_times_ = false;
  std::unique_ptr<gpu::ReadyClock> ready_clock_;  // of a device, while they are recorded
  std::vector<int64_t> ready_times_ns_;           // only while they are recorded, or the timeline is on
  std::vector<int64_t> unused_;                   // not reachable from the outputs (or never fired, for a static graph)
  std::vector<Late> late_;
  double scale_ = 1.0;
  int64_t next_launch_ = 0;
  int64_t next_let_go_ = 0;        // used under launch_mutex_
  std::vector<uint8_t> reduced_;   // by parameter: its gradient is an average that only this rank has
  std::vector<at::Tensor> kept_;   // such averages, while a backward adds to them
  int64_t num_buckets_ready_ = 0;  // used under launch_mutex_
  at::Tensor gradient_stats_;
  std::unique_ptr<NonFiniteLog> non_finite_;  // null unless they are looked for
  std::vector<int64_t> bad_averages_;
  std::mutex begin_mutex_, launch_mutex_, late_mutex_, streams_mutex_;
  mutable std::mutex layout_mutex_;  // of buckets_; never taken by a step whose buckets stay
  torch::distributed::autograd::ContextPtr rpc_context_;

  // Modes.
  bool views_ = true;
  bool overlap_ = true;
  bool optimizer_in_backward_ = false;
  bool graph_static_ = true;
  std::optional<std::vector<int64_t>> previous_unused_;
  std::optional<at::ScalarType> mixed_precision_dtype_;
  std::optional<SparseMetadata> sparse_metadata_;
  std::optional<c10::List<c10::intrusive_ptr<c10::ivalue::Future>>> futures_;
  c10::intrusive_ptr<c10d::Work> forward_work_;
  bool forward_work_static_world_ = false;
  std::function<int64_t()> divisor_;

  CommHook comm_hook_;
  StaticGraph static_graph_;
  StepStats stats_;
  const std::shared_ptr<LiveStatus> live_ = std::make_shared<LiveStatus>();
  timeline::Timeline timeline_;
  std::unique_ptr<GradHooks> hooks_;
  std::unique_ptr<UnusedSearch> search_;
  std::unique_ptr<UsedMap> used_map_;
};

}  // namespace torchddp::reducer
