// Which parameters a step uses, where some may be left out.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "reducer/base/context.h"
#include "reducer/graph/static_graph.h"
#include "reducer/graph/unused_search.h"
#include "reducer/report/events.h"

namespace torchddp::reducer {

// With find_unused_parameters the graph is searched in each step; with a static graph the first step tells. Otherwise all are used.
//
// Ranks tell each other by a map, one int32 a parameter: used here in this step, or in the no_sync steps before it. Summed over ranks,
// it tells which parameters nobody used: their gradients are left alone.
class UsedParams {
 public:
  UsedParams(const Context& context, const StaticGraph& static_graph, const StepEvents& events);
  // For the search; kept.
  void set_hooks(const GradHooks& hooks) { search_ = std::make_unique<UnusedSearch>(hooks); }
  // Ranks tell each other from here on: with a static graph too.
  void make_map();

  // Whether ranks tell each other what they use.
  bool are_known() const { return used_here_ != nullptr; }
  bool are_searched() const { return context_.config.find_unused_parameters && !static_graph_.enabled(); }

  // No gradient that was accumulated under no_sync is forgotten. `places`: where each parameter was before, or kNotThere.
  void take_over(const UsedParams& before, std::span<const int64_t> places);

  // In each hook, also under no_sync: a parameter that any microbatch used counts as used in the step that synchronises.
  void note(int64_t param) {
    if (are_known() && !static_graph_.replaying()) [[unlikely]] {
      note_gradient(param);
    }
  }
  // Looks for the parameters that `outputs` do not depend on.
  void search(std::span<const at::Tensor> outputs);
  // A static graph was recorded.
  void take_from_graph();
  // What this backward will not use.
  std::span<const int64_t> unused() const {
    return static_graph_.recording() ? std::span<const int64_t>() : std::span<const int64_t>(unused_);
  }
  int64_t unused_bytes() const;
  bool is_used_here(int64_t param) const { return !are_known() || used_here_[param] != 0; }

  // Collective; in each step that reduces, when all buckets are launched or before.
  void start_reduction();
  // The same where it is not started with the last bucket: while a static graph is being recorded.
  void start_reduction_if_recording();
  // Waits for other ranks, if it must: throws while a CUDA graph is captured.
  bool is_unused_everywhere(int64_t param);
  void finish();
  void abandon();
  // The transport is another one.
  void rebind();

  // Whether unused parameters have been the same in all steps.
  bool have_been_static() const { return static_; }
  // int32, one element a parameter: after a step, the number of ranks that used each.
  at::Tensor map() const;
  // Collective, of a rank without inputs, which uses none.
  void match();

 private:
  void note_gradient(int64_t param);
  void copy_to_device();
  void wait_for_reduction();
  void reset();

  const Context& context_;
  const StaticGraph& static_graph_;
  const StepEvents& events_;
  std::unique_ptr<UnusedSearch> search_;
  std::vector<int64_t> unused_;
  std::optional<std::vector<int64_t>> previous_;
  bool static_ = true;

  at::Tensor host_map_;    // CPU
  at::Tensor device_map_;  // where it is reduced
  // What captured graphs read in each replay, as it was when they were captured.
  std::vector<at::Tensor> captured_maps_;
  int32_t* used_here_ = nullptr;  // of host_map_
  at::Tensor counts_;             // the sum, on the CPU; undefined until it is asked for
  std::unique_ptr<transport::Work> work_;
  bool in_flight_ = false;
};

}  // namespace torchddp::reducer
