// The autograd hooks: one per parameter. Each runs without the GIL after its gradient was accumulated.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <span>
#include <utility>
#include <vector>

namespace torchddp::reducer {

// Called by the autograd thread that accumulated the gradient; concurrently when a model spans several devices.
class GradSink {
 public:
  // Called before autograd adds `incoming`, which may be replaced, to the gradient. Only after GradHooks::call_before.
  virtual void before_accumulation(int64_t param, at::Tensor& incoming) = 0;
  // `incoming`: the tensor that autograd passed to the parameter and still holds; null if unknown.
  virtual void on_grad_ready(int64_t param, const at::Tensor* incoming) = 0;
  // Throws unless compiled autograd may take over (it bypasses the hooks).
  virtual void check_compiled_autograd() const = 0;

 protected:
  ~GradSink() = default;
};

// The constructor registers the hooks; the destructor or remove() removes them. The sink must outlive them.
class GradHooks {
 public:
  GradHooks(std::span<const at::Tensor> params, GradSink& sink);
  ~GradHooks() { remove(); }
  GradHooks& operator=(GradHooks&&) = delete;

  // From now on the sink is also called before each gradient is accumulated.
  void call_before();
  void remove();
  // Whether someone else has registered a hook with one of the parameters or its node.
  bool has_foreign_hooks() const;
  // A parameter's AccumulateGrad node, where every autograd graph that uses the parameter ends.
  torch::autograd::Node* accumulator(int64_t param) const { return hooks_[param].node.get(); }

 private:
  // A parameter only holds its accumulator weakly, so the hooks keep it alive. The pointer type changed from std::shared_ptr
  // (torch 2.12) to c10::intrusive_ptr (2.13) under the same mangled name, so it is taken from the header.
  using AccumulatorPtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  struct Hooked {
    AccumulatorPtr node;
    uintptr_t ready;                                       // the key of the hook that runs after it
    torch::autograd::FunctionPreHook* pre_hook = nullptr;  // owned by the node
  };
  GradSink& sink_;
  bool calls_before_ = false;
  bool removed_ = false;
  std::vector<Hooked> hooks_;
};

}  // namespace torchddp::reducer
