#include "reducer/graph/forward_watch.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <atomic>

namespace torchddp::reducer {

struct ForwardWatch::Fates {
  std::atomic<int64_t> newest{-1};
  std::atomic<int64_t> reduced{-1};  // the newest forward when gradients were last averaged
  std::atomic<int64_t> left{-1};
  std::atomic<int64_t> used{-1};
};

namespace {

using torch::autograd::variable_list;

// Shared by the outputs of one forward; destroyed with the last of their graphs.
class Outputs {
 public:
  Outputs(std::shared_ptr<ForwardWatch::Fates> fates, int64_t forward) : fates_(std::move(fates)), forward_(forward) {}
  ~Outputs() {
    if (!used_.load(std::memory_order_relaxed) && forward_ > fates_->reduced.load(std::memory_order_relaxed)) {
      fates_->left.store(forward_, std::memory_order_relaxed);
    }
  }
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;

  void use() {
    used_.store(true, std::memory_order_relaxed);
    fates_->used.store(forward_, std::memory_order_relaxed);
  }

 private:
  const std::shared_ptr<ForwardWatch::Fates> fates_;
  const int64_t forward_;
  std::atomic<bool> used_{false};
};

class UseHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit UseHook(std::shared_ptr<Outputs> outputs) : outputs_(std::move(outputs)) {}

  variable_list operator()(const variable_list& grads) override {
    outputs_->use();
    return grads;
  }

  // Compiled autograd may ignore it.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}

 private:
  const std::shared_ptr<Outputs> outputs_;
};

}  // namespace

ForwardWatch::ForwardWatch() : fates_(std::make_shared<Fates>()) {}

void ForwardWatch::watch(int64_t forward, std::span<const at::Tensor> outputs) {
  fates_->newest.store(forward, std::memory_order_relaxed);
  std::shared_ptr<Outputs> common;
  for (const auto& output : outputs) {
    if (const auto& node = output.grad_fn()) {
      if (common == nullptr) {
        common = std::make_shared<Outputs>(fates_, forward);
      }
      node->add_pre_hook(std::make_unique<UseHook>(common));
    }
  }
}

void ForwardWatch::reduced() {
  fates_->reduced.store(fates_->newest.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

std::pair<int64_t, int64_t> ForwardWatch::left_and_used() const {
  return {fates_->left.load(std::memory_order_relaxed), fates_->used.load(std::memory_order_relaxed)};
}

}  // namespace torchddp::reducer
