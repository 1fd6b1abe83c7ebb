// Finds the parameters that an autograd graph does not reach.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <span>
#include <vector>

#include "reducer/graph/grad_hooks.h"

namespace torchddp::reducer {

// Reuses its memory from step to step.
class UnusedSearch {
 public:
  explicit UnusedSearch(const GradHooks& hooks) : hooks_(hooks) {}
  // Indices, in ascending order, of the parameters whose accumulators cannot be reached from `outputs`.
  std::vector<int64_t> find(std::span<const at::Tensor> outputs);

 private:
  const GradHooks& hooks_;
  ska::flat_hash_set<const torch::autograd::Node*> seen_;
  std::vector<torch::autograd::Node*> stack_;
};

}  // namespace torchddp::reducer
