#include "reducer/graph/unused_params.h"

#include <ATen/Functions.h>

#include <algorithm>

namespace torchddp::reducer {

const std::vector<int64_t>& UnusedSearch::find(std::span<const at::Tensor> outputs) {
  seen_.clear();
  stack_.clear();
  unused_.clear();
  for (const auto& output : outputs) {
    if (auto* node = output.grad_fn().get(); node != nullptr && seen_.insert(node).second) {
      stack_.push_back(node);
    }
  }
  while (!stack_.empty()) {
    auto* node = stack_.back();
    stack_.pop_back();
    for (const auto& edge : node->next_edges()) {
      if (auto* next = edge.function.get(); next != nullptr && seen_.insert(next).second) {
        stack_.push_back(next);
      }
    }
  }
  for (int64_t i = 0; i < hooks_.size(); ++i) {
    if (!seen_.count(hooks_.accumulator(i))) {
      unused_.push_back(i);
    }
  }
  return unused_;
}

UsedMap::UsedMap(int64_t num_params, at::Device device, transport::Transport& transport)
    : host_map_(at::zeros({num_params}, at::kInt)),
      device_map_(at::zeros({num_params}, at::TensorOptions().dtype(at::kInt).device(device))),
      local_(host_map_.data_ptr<int32_t>()),
      work_(transport.make_work()) {}

void UsedMap::rebind(transport::Transport& transport) {
  work_ = transport.make_work();
  reset();
}

void UsedMap::start_reduction(transport::Transport& transport) {
  c10::NoGradGuard no_grad;
  // Blocking copy: reset() rewrites the host map at the end of the step, possibly before a queued copy would have read it.
  device_map_.copy_(host_map_);
  transport.all_reduce(device_map_, *work_);
  in_flight_ = true;
  global_data_ = nullptr;
}

void UsedMap::finish_reduction(std::chrono::milliseconds timeout) {
  if (in_flight_) {
    in_flight_ = false;
    work_->wait(timeout);
  }
}

bool UsedMap::used_anywhere(int64_t param, std::chrono::milliseconds timeout) {
  if (used_here(param)) {
    return true;
  }
  if (global_data_ == nullptr) {
    finish_reduction(timeout);
    global_ = device_map_.cpu();
    global_data_ = global_.const_data_ptr<int32_t>();
  }
  return global_data_[param] != 0;
}

void UsedMap::reset() {
  std::fill_n(local_, host_map_.numel(), 0);
  global_data_ = nullptr;
  in_flight_ = false;
}

void UsedMap::abandon() {
  work_->abandon();
  reset();
}

}  // namespace torchddp::reducer
