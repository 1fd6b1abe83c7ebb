#include "reducer/graph/grad_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>

#include "common/check.h"

namespace torchddp::reducer {
namespace {

using torch::autograd::variable_list;

template <typename Base>
class ParamHook : public Base {
 public:
  ParamHook(GradSink& sink, int64_t param) : sink_(sink), param_(param) {}

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    sink_.check_compiled_autograd();
  }

 protected:
  GradSink& sink_;
  int64_t param_;
};

class ReadyHook final : public ParamHook<torch::autograd::FunctionPostHook> {
 public:
  using ParamHook::ParamHook;

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    sink_.on_grad_ready(param_, inputs.size() == 1 && inputs[0].defined() ? &inputs[0] : nullptr);
    return outputs;  // AccumulateGrad has no outputs: an empty list
  }
};

class AccumulationPreHook final : public ParamHook<torch::autograd::FunctionPreHook> {
 public:
  using ParamHook::ParamHook;

  variable_list operator()(const variable_list& grads) override {
    auto incoming = grads;
    if (incoming.size() == 1) sink_.before_accumulation(param_, incoming[0]);
    return incoming;
  }
};

}  // namespace

GradHooks::GradHooks(std::span<const at::Tensor> params, GradSink& sink) : sink_(sink) {
  hooks_.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(params[i]);
    TDDP_CHECK(accumulator != nullptr, "parameter ", i,
               " has no gradient accumulator: it is not a leaf that requires grad");
    const auto key = accumulator->add_post_hook(std::make_unique<ReadyHook>(sink, static_cast<int64_t>(i)));
    hooks_.push_back({std::move(accumulator), key});
  }
}

void GradHooks::call_before() {
  if (removed_ || std::exchange(calls_before_, true)) return;
  for (size_t i = 0; i < hooks_.size(); ++i) {
    auto hook = std::make_unique<AccumulationPreHook>(sink_, static_cast<int64_t>(i));
    hooks_[i].pre_hook = hook.get();
    hooks_[i].node->add_pre_hook(std::move(hook));
  }
}

bool GradHooks::has_foreign_hooks() const {
  return std::ranges::any_of(hooks_, [](const Hooked& hooked) {
    auto& node = *hooked.node;
    const size_t own_before = hooked.pre_hook != nullptr ? 1 : 0;
    return node.post_hooks().size() > 1 || node.pre_hooks().size() > own_before || !node.tensor_pre_hooks().empty() ||
           node.tensor_post_acc_grad_hooks() != nullptr;
  });
}

void GradHooks::remove() {
  if (std::exchange(removed_, true)) return;
  for (auto& [node, ready, pre_hook] : hooks_) {
    node->del_post_hook(ready);
    std::erase_if(node->pre_hooks(), [pre_hook](const auto& hook) { return hook.get() == pre_hook; });
  }
}

}  // namespace torchddp::reducer
