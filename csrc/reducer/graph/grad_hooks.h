// The autograd hooks: one per parameter, fired after its gradient was accumulated, without the GIL.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace torchddp::reducer {

// Called by whichever autograd thread accumulated the gradient; several at once when a model spans devices.
class GradSink {
 public:
  // Before autograd adds `incoming`, which may be replaced, to the gradient. Only after GradHooks::call_before.
  virtual void on_grad_coming(int64_t param, at::Tensor& incoming) = 0;
  // `incoming`: what autograd handed to the parameter and still holds; null if unknown.
  virtual void on_grad_ready(int64_t param, const at::Tensor* incoming) = 0;
  // Whether compiled autograd may take over (it then bypasses the hooks).
  virtual void check_compiled_autograd() const = 0;

 protected:
  ~GradSink() = default;
};

// Registers on construction, removes on destruction or by remove(). The sink must outlive the hooks.
class GradHooks {
 public:
  GradHooks(std::span<const at::Tensor> params, GradSink& sink);
  ~GradHooks() { remove(); }
  GradHooks(const GradHooks&) = delete;
  GradHooks& operator=(const GradHooks&) = delete;

  // From now on the sink hears of gradients before they are accumulated, too.
  void call_before();
  void remove();
  // The AccumulateGrad node of each parameter: where an autograd graph ends that uses it.
  torch::autograd::Node* accumulator(int64_t param) const { return hooks_[static_cast<size_t>(param)].first.get(); }
  int64_t size() const { return static_cast<int64_t>(hooks_.size()); }

 private:
  // A parameter holds its accumulator only weakly, so the hooks keep it alive. The pointer type changed between torch 2.12
  // (std::shared_ptr) and 2.13 (c10::intrusive_ptr) under one mangled name: take it from the header.
  using AccumulatorPtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  GradSink& sink_;
  bool calls_before_ = false;
  std::vector<std::pair<AccumulatorPtr, uintptr_t>> hooks_;
  // autograd knows no way to remove a hook that runs before a node: those are told.
  std::shared_ptr<std::atomic<bool>> removed_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace torchddp::reducer
