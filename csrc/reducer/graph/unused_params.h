// Which parameters a step uses: graph search on this rank, and agreement between ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <span>
#include <vector>

#include "reducer/graph/grad_hooks.h"
#include "transport/transport.h"

namespace torchddp::reducer {

// Finds the parameters that an autograd graph does not reach. Its memory is reused from step to step.
class UnusedSearch {
 public:
  explicit UnusedSearch(const GradHooks& hooks) : hooks_(hooks) {}
  // Parameter indices, ascending, whose accumulator cannot be reached from `outputs`. The reference is valid until the next call.
  const std::vector<int64_t>& find(std::span<const at::Tensor> outputs);

 private:
  const GradHooks& hooks_;
  ska::flat_hash_set<const torch::autograd::Node*> seen_;
  std::vector<torch::autograd::Node*> stack_;
  std::vector<int64_t> unused_;
};

// One int32 a parameter: used here in this step, or in the no_sync steps before it. Summed over ranks, it tells which
// parameters nobody used: their gradients are left alone.
class UsedMap {
 public:
  UsedMap(int64_t num_params, at::Device device, transport::Transport& transport);

  void mark(int64_t param) { local_[param] = 1; }
  bool used_here(int64_t param) const { return local_[param] != 0; }
  void start_reduction(transport::Transport& transport);
  // Whether used_anywhere() waits for nothing.
  bool is_known() const { return global_data_ != nullptr; }
  // Waits for the reduction at the first call in a step; later ones are cheap.
  bool used_anywhere(int64_t param, std::chrono::milliseconds timeout);
  // Waits for the reduction, if one is under way.
  void finish_reduction(std::chrono::milliseconds timeout);
  void reset();
  void abandon();
  void rebind(transport::Transport& transport);

  // The device tensor that is reduced (int32, one element a parameter): after a step, the number of ranks that used each.
  const at::Tensor& device_map() const { return device_map_; }

 private:
  at::Tensor host_map_;    // CPU, int32
  at::Tensor device_map_;  // on the model's device, int32
  int32_t* local_ = nullptr;
  at::Tensor global_;  // CPU copy of the sum
  const int32_t* global_data_ = nullptr;
  std::unique_ptr<transport::Work> work_;
  bool in_flight_ = false;
};

}  // namespace torchddp::reducer
