#include "reducer/graph/unused_search.h"

namespace torchddp::reducer {

std::vector<int64_t> UnusedSearch::find(std::span<const at::Tensor> outputs) {
  seen_.clear();
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen_.insert(node).second) {
      stack_.push_back(node);
    }
  };
  for (const auto& output : outputs) {
    visit(output.grad_fn().get());
  }
  while (!stack_.empty()) {
    auto* node = stack_.back();
    stack_.pop_back();
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  std::vector<int64_t> unused;
  for (int64_t i = 0; i < hooks_.size(); ++i) {
    if (seen_.count(hooks_.accumulator(i)) == 0) {
      unused.push_back(i);
    }
  }
  return unused;
}

}  // namespace torchddp::reducer
