// What the parts of a reducer share: its parameters, its configuration, and whom it reduces with.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/autograd/context/context.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "bucket/slot_view.h"
#include "gpu/device.h"
#include "plan/bucket_plan.h"
#include "reducer/base/main_grads.h"
#include "transport/transport.h"

namespace torchddp::reducer {

// In which dtype gradients of 16-bit parameters are reduced and kept; those of others are kept in their own.
enum class GradPrecision : uint8_t {
  kOfParameter,
  kReduced,    // reduced in fp32, and rounded to .grad
  kGrads,      // .grad is fp32, as autograd makes it: the parameter says so (Tensor.grad_dtype)
  kMainGrads,  // they add up beside .grad: see MainGrads. So do those of other parameters, in their own dtype
};

struct ReducerConfig {
  plan::BucketLimits limits;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = true;
  // Whose storage views have: see Note [Gradients that the program keeps] in bucket/slot_view.h.
  bucket::ViewStorage view_storage = bucket::ViewStorage::kOwn;
  bool skip_all_reduce_unused_params = false;
  bool compiled_autograd_takes_over = false;  // torch's "python_reducer" mode
  std::optional<at::ScalarType> wire_dtype;   // fp32 buckets travel in it
  // Buckets that have an owner, if they are fp32: cast to this before they are reduced, and back where they are kept.
  std::optional<at::ScalarType> reduce_dtype;
  GradPrecision grad_precision = GradPrecision::kOfParameter;
  bool gradient_stats = false;   // measure every bucket once it is reduced
  bool find_non_finite = false;  // look at this rank's own gradients before they are averaged
  // ... and at the averages: see Note [Non-finite averages] in report/non_finite_watch.h
  bool raise_non_finite = false;
  bool weighted = false;           // every backward must have a weight: see Note [Weighted means] in weights.h
  bool zero_weights_raise = true;  // ... and in each step some rank's must be above 0
  // Gradients at least this large are reduced where autograd made them, where buckets are packed when they are complete: see
  // Note [Adopted gradients] in bucket/grad_slot.h; 0: none are.
  int64_t adopt_bytes = 0;
  bool pack_whole_buckets = false;  // pack a bucket when it is complete, on the CPU too, as on other devices
  std::chrono::milliseconds timeout = transport::kTransportTimeout;
};

// Of a parameter that another reducer did not have.
inline constexpr int64_t kNotThere = -1;

// The Reducer writes to it between steps, and to `rpc` when a backward begins; PlanKeeper alone changes the transport.
struct Context {
  Context(std::vector<at::Tensor> params_, std::vector<plan::ParamSpec> specs_,
          c10::intrusive_ptr<c10d::ProcessGroup> group_, std::shared_ptr<transport::Transport> transport_,
          ReducerConfig config_);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int rank() const { return transport->rank(); }
  int64_t num_params() const { return static_cast<int64_t>(params.size()); }
  const plan::ParamSpec& spec(int64_t param) const { return specs[static_cast<size_t>(param)]; }
  at::Device param_device() const { return params.front().device(); }
  // Whether buckets are packed when they are complete, and not gradient by gradient.
  bool packs_whole_buckets() const { return config.pack_whole_buckets || !param_device().is_cpu(); }
  // Whether views have storages of their own, so that the program may keep them.
  bool keeps_apart() const { return config.view_storage == bucket::ViewStorage::kOwn; }
  // Whether the step becomes part of a CUDA graph.
  bool is_captured() const;
  // By parameter: which of the others' it is, or kNotThere.
  std::vector<int64_t> places_in(const Context& other) const;
  // The CUDA device of a parameter; null for others.
  std::shared_ptr<gpu::Device> device_of(int64_t param) const;

  // How the bucket of a parameter keeps gradients.
  bucket::Keeping keeping(int64_t param) const;
  // The gradient of a parameter as the model keeps it.
  at::Tensor& kept_grad(int64_t param) const {
    return main_grads == nullptr ? params[static_cast<size_t>(param)].mutable_grad() : main_grads->of(param);
  }

  // Calls `callback` with the gradient of a parameter, to read or to change: as the model keeps it, or in the RPC context of a
  // distributed autograd.
  template <typename Callback>
  void with_grad(int64_t param, Callback&& callback) const {
    if (rpc != nullptr) [[unlikely]] {
      auto handle = params[static_cast<size_t>(param)];
      rpc->runGradCallbackForVariable(handle, [&](at::Tensor& grad) {
        callback(grad);
        return true;
      });
      return;
    }
    callback(kept_grad(param));
  }

  const std::vector<at::Tensor> params;
  const std::vector<plan::ParamSpec> specs;
  const ReducerConfig config;
  const bool owned;                                         // buckets have owners
  const std::vector<std::shared_ptr<gpu::Device>> devices;  // those of CUDA that the model is on
  const std::unique_ptr<MainGrads> main_grads;              // null: gradients are in .grad
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<transport::Transport> transport;
  bool views;                                         // gradients are views of the buckets
  bool shares_gradients = false;                      // another reducer averages the same ones
  torch::distributed::autograd::ContextPtr rpc = {};  // of the backward under way
};

}  // namespace torchddp::reducer
