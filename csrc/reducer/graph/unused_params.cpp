#include "reducer/graph/unused_params.h"

#include <ATen/Functions.h>

#include <algorithm>

namespace torchddp::reducer {
namespace {

size_t hash(const void* pointer) {
  // Nodes are heap objects: the low bits are always the same. Fibonacci hashing spreads the rest.
  return (reinterpret_cast<uintptr_t>(pointer) >> 4) * 0x9E3779B97F4A7C15ull;
}

constexpr size_t kInitialTable = 1024;

}  // namespace

UnusedSearch::UnusedSearch(const GradHooks& hooks) : hooks_(hooks), table_(kInitialTable) {}

void UnusedSearch::grow() {
  std::vector<std::pair<const torch::autograd::Node*, uint64_t>> old(table_.size() * 2);
  old.swap(table_);
  used_ = 0;
  for (const auto& [node, epoch] : old) {
    if (epoch == epoch_) {
      insert(node);
    }
  }
}

bool UnusedSearch::insert(const torch::autograd::Node* node) {
  if (used_ * 2 >= table_.size()) {
    grow();
  }
  const size_t mask = table_.size() - 1;
  for (size_t i = hash(node) & mask;; i = (i + 1) & mask) {
    auto& entry = table_[i];
    if (entry.second != epoch_) {
      entry = {node, epoch_};
      ++used_;
      return true;
    }
    if (entry.first == node) {
      return false;
    }
  }
}

const std::vector<int64_t>& UnusedSearch::find(std::span<const at::Tensor> outputs) {
  ++epoch_;
  used_ = 0;
  stack_.clear();
  unused_.clear();
  for (const auto& output : outputs) {
    if (const auto& grad_fn = output.grad_fn()) {
      if (insert(grad_fn.get())) {
        stack_.push_back(grad_fn.get());
      }
    }
  }
  while (!stack_.empty()) {
    auto* node = stack_.back();
    stack_.pop_back();
    for (const auto& edge : node->next_edges()) {
      if (auto* next = edge.function.get(); next != nullptr && insert(next)) {
        stack_.push_back(next);
      }
    }
  }
  for (int64_t i = 0; i < hooks_.size(); ++i) {
    if (insert(hooks_.accumulator(i))) {
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
  transport.start(transport::Collective::all_reduce(device_map_), *work_);
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
