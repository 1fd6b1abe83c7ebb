#include "reducer/graph/used_params.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "common/check.h"
#include "common/errors.h"
#include "reducer/report/messages.h"
#include "transport/cuda/cuda_device.h"

namespace torchddp::reducer {

bool StaticGraph::count(int64_t param, const at::Tensor* incoming) {
  if (incoming == nullptr && left_[param] <= 0 && (recorded_ || lacks_outputs_)) {
    bool lacking = false;
    context_.with_grad(param, [&](const at::Tensor& grad) { lacking = !grad.defined(); });
    if (lacking) return false;
  }
  if (!recorded_) {
    ++expected_[param];
    return false;
  }
  if (left_[param] <= 0) throw GraphError(static_graph_changed_message(context_, param));
  return --left_[param] == 0;
}

// Indices, in ascending order, of the parameters whose accumulators cannot be reached from `outputs`.
std::vector<int64_t> UsedParams::unreached(std::span<const at::Tensor> outputs) {
  seen_.clear();
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen_.insert(node).second) stack_.push_back(node);
  };
  for (const auto& output : outputs) visit(output.grad_fn().get());
  while (!stack_.empty()) {
    auto* node = stack_.back();
    stack_.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  std::vector<int64_t> unused;
  for (int64_t i = 0; i < context_.num_params(); ++i) {
    if (seen_.count(hooks_->accumulator(i)) == 0) unused.push_back(i);
  }
  return unused;
}

UsedParams::UsedParams(const Context& context, const StaticGraph& static_graph, const StepEvents& events)
    : context_(context), static_graph_(static_graph), events_(events) {
  if (context.config.find_unused_parameters) make_map();
}

void UsedParams::make_map() {
  if (!are_known()) {
    host_map_ = at::zeros({context_.num_params()}, at::kInt);
    last_map_ = at::zeros_like(host_map_);
    device_map_ = at::zeros_like(host_map_, at::TensorOptions().device(context_.param_device()));
    used_here_ = host_map_.mutable_data_ptr<int32_t>();
    work_ = context_.transport->make_work();
  }
}

void UsedParams::take_over(const UsedParams& before, std::span<const int64_t> places) {
  for (int64_t param = 0; are_known() && param < context_.num_params(); ++param) {
    const auto place = places[param];
    if (before.are_searched() && place != kNotThere) {
      used_here_[param] = before.used_here_[place];
      last_map_.mutable_data_ptr<int32_t>()[param] = before.last_map_.const_data_ptr<int32_t>()[place];
    } else {
      note_gradient(param, nullptr);
    }
  }
}

void UsedParams::take_over_search(const UsedParams& before, std::span<const int64_t> places) {
  for (int64_t param = 0; param < context_.num_params(); ++param) {
    const auto place = places[param];
    if (place == kNotThere || std::ranges::count(before.unused_, place) != 0) unused_.push_back(param);
  }
}

void UsedParams::search(std::span<const at::Tensor> outputs) {
  if (!static_graph_.enabled()) unused_.clear();
  if (!are_searched()) return;
  RECORD_FUNCTION("torch.distributed.ddp.reducer::search_unused_parameters", std::vector<c10::IValue>());
  unused_ = unreached(outputs);
  if (static_ && previous_) static_ = *previous_ == unused_;
  previous_ = unused_;
}

void UsedParams::copy_to_device() {
  if (!transport::is_gpu(device_map_.device())) {
    device_map_.copy_(host_map_);
    return;
  }
  // Pinned memory, so that the host does not wait. It is allocated for each copy: reset() may overwrite the host map before the
  // device has read it, and torch's allocator does not reuse pinned memory that is still being read.
  const auto pinned = at::empty_like(host_map_, at::TensorOptions().pinned_memory(true));
  pinned.copy_(host_map_);
  device_map_.copy_(pinned, /*non_blocking=*/true);
  if (context_.is_captured()) captured_maps_.push_back(pinned);
}

void UsedParams::start_reduction() {
  const c10::NoGradGuard no_grad;
  copy_to_device();
  reduce_map();
}

void UsedParams::match() {
  const c10::NoGradGuard no_grad;
  device_map_.zero_();
  reduce_map();
}

void UsedParams::reduce_map() {
  context_.transport->start(transport::Collective::all_reduce(device_map_), *work_);
  in_flight_ = true;
  counts_.reset();
}

bool UsedParams::is_unused_everywhere(int64_t param) {
  if (is_used_here(param)) return false;
  if (!counts_.defined()) {
    TDDP_CHECK(
        !context_.is_captured(), "rank ", context_.rank(), ": parameter '", context_.spec(param).name,
        "' was not used in a step that a CUDA graph captures. Its gradient depends on whether other ranks used it, "
        "which the host can't read during a capture: capture a step that uses all parameters, or set "
        "requires_grad=False for the unused ones and wrap the model again.");
    wait_for_reduction();
    counts_ = device_map_.cpu();
  }
  return counts_.const_data_ptr<int32_t>()[param] == 0;
}

void UsedParams::finish() {
  described_in_step(context_, events_, "finding out which parameters other ranks used", [&] { wait_for_reduction(); });
  if (are_searched()) reset();
}

at::Tensor UsedParams::map() const {
  TDDP_CHECK(are_known(), "the map of used parameters exists only with find_unused_parameters or static_graph");
  return device_map_;
}

}  // namespace torchddp::reducer
