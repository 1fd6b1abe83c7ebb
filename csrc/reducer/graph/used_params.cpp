#include "reducer/graph/used_params.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>

#include "common/check.h"
#include "reducer/report/failure.h"

namespace torchddp::reducer {
namespace {

constexpr const char* kWaitsForOthers = "which parameters other ranks used";

}  // namespace

UsedParams::UsedParams(const Context& context, const StaticGraph& static_graph, const StepEvents& events)
    : context_(context), static_graph_(static_graph), events_(events) {
  if (context.config.find_unused_parameters) {
    map_ = std::make_unique<UsedMap>(context.num_params(), context.param_device(), *context.transport);
  }
}

void UsedParams::expect_static_graph() {
  if (map_ == nullptr) {
    map_ = std::make_unique<UsedMap>(context_.num_params(), context_.param_device(), *context_.transport);
  }
}

void UsedParams::note_gradient(int64_t param) {
  context_.with_grad(param, [&](const at::Tensor& grad) {
    if (grad.defined()) {
      map_->mark(param);
    }
  });
}

void UsedParams::search(std::span<const at::Tensor> outputs) {
  if (!are_searched()) {
    return;
  }
  RECORD_FUNCTION("torch.distributed.ddp.reducer::search_unused_parameters", std::vector<c10::IValue>());
  unused_ = search_->find(outputs);
  if (static_ && previous_) {
    static_ = *previous_ == unused_;
  }
  previous_ = unused_;
  if (unused_.empty()) {
    TORCH_WARN_ONCE(
        "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the "
        "forward pass. The search of the autograd graph costs time in every step: turn the flag off if the model never "
        "has unused parameters. (A false positive if control flow leaves parameters unused in later steps.)");
  }
}

void UsedParams::take_from_graph() {
  unused_.clear();
  for (int64_t param = 0; param < context_.num_params(); ++param) {
    if (!static_graph_.was_used(param)) {
      unused_.push_back(param);
    }
  }
}

int64_t UsedParams::unused_bytes() const {
  int64_t bytes = 0;
  for (const auto param : unused_) {
    bytes += context_.spec(param).bytes();
  }
  return bytes;
}

void UsedParams::start_reduction() { map_->start_reduction(*context_.transport); }

void UsedParams::start_reduction_if_recording() {
  if (static_graph_.recording()) {
    start_reduction();
  }
}

bool UsedParams::is_unused_everywhere(int64_t param) {
  if (is_used_here(param)) {
    return false;
  }
  if (map_->is_known()) {
    return !map_->used_anywhere(param, context_.config.timeout);
  }
  const WaitScope waits(events_.live(), kWaitsForOthers);
  return !map_->used_anywhere(param, context_.config.timeout);
}

void UsedParams::finish() {
  if (map_ == nullptr) {
    return;
  }
  const WaitScope waits(events_.live(), kWaitsForOthers);
  described_in_step(context_, events_, "finding out which parameters other ranks used",
                    [&] { map_->finish_reduction(context_.config.timeout); });
  if (are_searched()) {
    map_->reset();
  }
}

void UsedParams::abandon() {
  if (map_ != nullptr) {
    map_->abandon();
  }
}

void UsedParams::rebind() {
  if (map_ != nullptr) {
    map_->rebind(*context_.transport);
  }
}

at::Tensor UsedParams::map() const {
  TDDP_CHECK(map_ != nullptr, "the map of used parameters exists only with find_unused_parameters or static_graph");
  return map_->device_map();
}

void UsedParams::match() {
  TDDP_CHECK(map_ != nullptr, "there is no map of used parameters to match");
  auto none = at::zeros_like(map_->device_map());
  auto work = context_.transport->make_work();
  const WaitScope waits(events_.live(), kWaitsForOthers);
  context_.transport->start(transport::Collective::all_reduce(none), *work);
  work->wait(context_.config.timeout);
}

}  // namespace torchddp::reducer
