// Which parameters a step uses: recorded once (static graph), searched for in every step, or exchanged by the ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "reducer/base/context.h"
#include "reducer/graph/grad_hooks.h"
#include "reducer/report/events.h"

namespace torchddp::reducer {

// How often each gradient hook fires per step, recorded once and then expected in every step.
class StaticGraph {
 public:
  explicit StaticGraph(const Context& context) : context_(context) {}

  void enable() {
    enabled_ = true;
    others_recorded_ = false;
    restart_recording();
  }
  bool enabled() const { return enabled_; }
  // The first synchronized backward reduces nothing until it ends, because only then is it known which firing is the last.
  bool recording() const { return enabled_ && !recorded_; }
  bool replaying() const { return enabled_ && recorded_; }
  // Whether the other ranks record in this step, too. Not if this rank had no inputs when they did (join).
  bool all_record() const { return recording() && !others_recorded_; }
  // The loss leaves outputs out, so hooks also fire without a gradient: torch's sink, which only the recorded step has, leads there.
  void note_unused_outputs() { lacks_outputs_ = true; }
  void note_others_recorded() { others_recorded_ = true; }

  // The recording is complete, or a new one begins.
  void finish_recording() { recorded_ = true; }
  void restart_recording() {
    recorded_ = lacks_outputs_ = false;
    expected_.assign(context_.params.size(), 0);
    left_ = expected_;
  }
  void begin_step() {
    if (recording()) restart_recording();  // left by a step that failed
    left_ = expected_;
  }

  // A parameter's hook has fired. True if its gradient is complete, which is always so when no graph is expected. Throws
  // GraphError if the hook has fired more often than in the recorded step.
  bool is_last(int64_t param, const at::Tensor* incoming) { return !enabled_ || count(param, incoming); }
  bool was_used(int64_t param) const { return expected_[param] != 0; }
  bool has_recorded() const { return expected_ != left_; }

 private:
  bool count(int64_t param, const at::Tensor* incoming);

  const Context& context_;
  bool enabled_ = false;
  bool recorded_ = false;
  bool others_recorded_ = false, lacks_outputs_ = false;
  std::vector<int32_t> expected_;
  std::vector<int32_t> left_;
};

// With find_unused_parameters the graph is searched in every step; with a static graph the first step records it. Otherwise all
// parameters count as used.
//
// Ranks exchange a map with one int32 per parameter: 1 if this rank used it in this step, or in the no_sync steps before it.
// The sum over ranks shows which parameters no rank used; their gradients are left alone.
class UsedParams {
 public:
  UsedParams(const Context& context, const StaticGraph& static_graph, const StepEvents& events);
  // For the search; the hooks must stay alive.
  void set_hooks(const GradHooks& hooks) { hooks_ = &hooks; }
  // From here on ranks exchange maps, with a static graph too.
  void make_map();

  // Whether ranks exchange maps, and whether they do so in this step.
  bool are_known() const { return used_here_ != nullptr; }
  bool are_exchanged() const { return are_searched() || static_graph_.all_record(); }
  bool are_searched() const { return context_.config.find_unused_parameters && !static_graph_.enabled(); }

  // Keeps the marks of gradients accumulated under no_sync, and of the last reduction for resume(). `places`: each parameter's
  // previous index, or kNotThere.
  void take_over(const UsedParams& before, std::span<const int64_t> places);
  // After a forward that has had no backward yet: it could not use parameters that were not there.
  void take_over_search(const UsedParams& before, std::span<const int64_t> places);

  // Called in each hook, under no_sync too: a parameter used by any microbatch counts as used in the step that synchronizes.
  void note(int64_t param, const at::Tensor* incoming) {
    if (are_known() && !static_graph_.replaying()) [[unlikely]]
      note_gradient(param, incoming);
  }
  // The same, if another reducer holds the gradient.
  void mark(int64_t param) {
    if (are_known() && !static_graph_.replaying()) used_here_[param] = 1;
  }
  // Finds the parameters that `outputs` do not depend on.
  void search(std::span<const at::Tensor> outputs);
  // A static graph has been recorded.
  void take_from_graph() {
    unused_.clear();
    for (int64_t param = 0; param < context_.num_params(); ++param) {
      if (!static_graph_.was_used(param)) unused_.push_back(param);
    }
  }
  // The parameters that this backward will not use.
  std::span<const int64_t> unused() const {
    return static_graph_.recording() ? std::span<const int64_t>() : std::span<const int64_t>(unused_);
  }
  int64_t unused_bytes() const {
    int64_t bytes = 0;
    for (const auto param : unused_) bytes += context_.spec(param).bytes();
    return bytes;
  }
  bool is_used_here(int64_t param) const { return !are_known() || used_here_[param] != 0; }

  // Collective, in every step in which they are exchanged, once all buckets are launched.
  void start_reduction();
  // The next reduction belongs to the same step as the last one: what was used there counts as used again.
  void resume() {
    if (are_searched()) host_map_.bitwise_or_(last_map_);
  }
  // The part of a rank without inputs (join), which uses no parameter.
  void match();
  void wait_for_reduction() {
    if (std::exchange(in_flight_, false)) {
      const WaitScope waits(events_.live(), "which parameters other ranks used");
      work_->wait(context_.config.timeout);
    }
  }
  // May wait for other ranks; throws while a CUDA graph is being captured.
  bool is_unused_everywhere(int64_t param);
  void finish();
  void abandon() {
    if (!are_known()) return;
    work_->abandon();
    reset();
  }
  // The transport was replaced.
  void rebind() {
    if (are_known()) {
      work_ = context_.transport->make_work();
      reset();
    }
  }

  // Whether the unused parameters have been the same in every step.
  bool have_been_static() const { return static_; }
  // int32, one element per parameter: after a step, the number of ranks that used it.
  at::Tensor map() const;

 private:
  std::vector<int64_t> unreached(std::span<const at::Tensor> outputs);
  void note_gradient(int64_t param, const at::Tensor* incoming) {
    // What came in is in the RPC context of this thread, if there is one; `context_` may not know it yet.
    using Rpc = torch::distributed::autograd::ThreadLocalDistAutogradContext;
    if (incoming != nullptr && Rpc::getContextPtr() != nullptr) used_here_[param] = 1;
    context_.with_grad(param, [&](const at::Tensor& grad) {
      if (grad.defined()) used_here_[param] = 1;
    });
  }
  void copy_to_device();
  void reduce_map();
  void reset() {
    in_flight_ = false;
    if (static_graph_.replaying()) return;  // what the recorded step has used counts in all later ones
    std::swap(host_map_, last_map_);
    used_here_ = host_map_.zero_().mutable_data_ptr<int32_t>();
    counts_.reset();
  }

  const Context& context_;
  const StaticGraph& static_graph_;
  const StepEvents& events_;
  const GradHooks* hooks_ = nullptr;
  ska::flat_hash_set<const torch::autograd::Node*> seen_;  // by a search; kept, as the next one needs as much memory
  std::vector<torch::autograd::Node*> stack_;
  std::vector<int64_t> unused_;
  std::optional<std::vector<int64_t>> previous_;
  bool static_ = true;

  at::Tensor host_map_;    // CPU
  at::Tensor last_map_;    // what it was in the last reduction
  at::Tensor device_map_;  // on the device where it is reduced
  // The maps that captured graphs read on each replay, as they were at capture.
  std::vector<at::Tensor> captured_maps_;
  int32_t* used_here_ = nullptr;  // points into host_map_
  at::Tensor counts_;             // the sum, on the CPU; undefined until requested
  std::unique_ptr<transport::Work> work_;
  bool in_flight_ = false;
};

}  // namespace torchddp::reducer
