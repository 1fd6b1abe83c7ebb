// State shared by the parts of a reducer: its parameters, configuration, process group and transport.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/autograd/context/context.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "bucket/slot_view.h"
#include "gpu/device.h"
#include "plan/bucket_plan.h"
#include "reducer/base/main_grads.h"
#include "transport/transport.h"

namespace torchddp::reducer {

// The dtype in which gradients of 16-bit parameters are reduced and stored. Other parameters' gradients keep their own dtype.
enum class GradPrecision : uint8_t {
  kOfParameter,
  kReduced,    // reduced in fp32, then rounded to .grad
  kGrads,      // .grad is fp32 as autograd produces it (Tensor.grad_dtype)
  kMainGrads,  // accumulated beside .grad (see MainGrads); other parameters too, in their own dtype
};

struct ReducerConfig : plan::BucketLimits {
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = true;
  // Which storage the views use: see Note [Gradients that the program keeps] in bucket/slot_view.h.
  bucket::ViewStorage view_storage = bucket::ViewStorage::kOwn;
  bool skip_all_reduce_unused_params = false;
  bool compiled_autograd_takes_over = false;  // torch's "python_reducer" mode
  std::optional<at::ScalarType> wire_dtype;   // fp32 buckets are sent to other hosts in this dtype
  // For fp32 buckets with an owner: the dtype they are cast to for the reduction, and back from afterwards.
  std::optional<at::ScalarType> reduce_dtype;
  GradPrecision grad_precision = GradPrecision::kOfParameter;
  bool gradient_stats = false;   // compute statistics of every reduced bucket
  bool find_non_finite = false;  // check this rank's own gradients before they are averaged
  // ... and check the averages: see Note [Non-finite averages] in report/non_finite.h
  bool raise_non_finite = false;
  bool weighted = false;           // every backward needs a weight: see Note [Weighted means] in weights.h
  bool zero_weights_raise = true;  // ... and each step needs a weight above 0 on at least one rank
  // Where whole buckets are packed, gradients of at least this size are reduced in the memory that autograd gave them: see
  // Note [Adopted gradients] in bucket/grad_slot.h. 0: none.
  int64_t in_place_bytes = 0;
  bool pack_whole_buckets = false;  // pack a bucket once it is complete on the CPU as well, as other devices do
  std::chrono::milliseconds timeout = transport::kTransportTimeout;
};

// The place of a parameter that the other reducer did not have.
inline constexpr int64_t kNotThere = -1;

// The Reducer writes to it between steps, and to `rpc` when a backward begins. Only PlanKeeper changes the transport, under a
// lock: other threads, which may interrupt it at any time, ask for `current_transport()`.
struct Context {
  Context(std::vector<at::Tensor> params_, std::vector<plan::ParamSpec> specs_,
          c10::intrusive_ptr<c10d::ProcessGroup> group_, std::shared_ptr<transport::Transport> transport_,
          ReducerConfig config_);
  Context& operator=(Context&&) = delete;

  int rank() const { return transport->rank(); }
  std::shared_ptr<transport::Transport> current_transport() const {
    const std::lock_guard lock(transport_mutex_);
    return transport;
  }
  // Returns the one before.
  std::shared_ptr<transport::Transport> exchange_transport(std::shared_ptr<transport::Transport> other) {
    const std::lock_guard lock(transport_mutex_);
    return std::exchange(transport, std::move(other));
  }
  int64_t num_params() const { return std::ssize(params); }
  const plan::ParamSpec& spec(int64_t param) const { return specs[param]; }
  at::Device param_device() const { return params.front().device(); }
  // Whether a bucket is packed in one go when it is complete, rather than gradient by gradient.
  bool packs_whole_buckets() const { return config.pack_whole_buckets || !param_device().is_cpu(); }
  // Whether views have their own storage, so that the program may keep them.
  bool has_own_storage() const { return config.view_storage == bucket::ViewStorage::kOwn; }
  // Whether the step is being captured into a CUDA graph.
  bool is_captured() const {
    return std::ranges::any_of(devices, [](const auto& device) { return device->capturing(device->current_stream()); });
  }
  // For each parameter, its index in `other`, or kNotThere.
  std::vector<int64_t> places_in(const Context& other) const;
  // The CUDA device of a parameter; null for others.
  std::shared_ptr<gpu::Device> device_of(int64_t param) const;

  // How a parameter's bucket stores its gradient.
  bucket::GradStorage grad_storage(int64_t param) const;
  // A parameter's gradient in the form the model keeps it.
  at::Tensor& kept_grad(int64_t param) const {
    return main_grads == nullptr ? params[param].mutable_grad() : main_grads->of(param);
  }

  // Calls `callback` with a parameter's gradient, for reading or writing: the one the model keeps, or the one in the RPC
  // context of a distributed autograd pass.
  template <typename Callback>
  void with_grad(int64_t param, Callback&& callback) const {
    if (rpc != nullptr) [[unlikely]] {
      auto handle = params[param];
      rpc->runGradCallbackForVariable(handle, [&](at::Tensor& grad) {
        callback(grad);
        return true;
      });
      return;
    }
    callback(kept_grad(param));
  }

  // Whether `test(param, its gradient)` is true of any parameter.
  template <typename Test>
  bool any_grad(Test&& test) const {
    bool found = false;
    for (int64_t param = 0; param < num_params() && !found; ++param) {
      with_grad(param, [&](const at::Tensor& grad) { found = test(param, grad); });
    }
    return found;
  }

  const std::vector<at::Tensor> params;
  const std::vector<plan::ParamSpec> specs;
  const ReducerConfig config;
  const bool owned;                                         // buckets have owners
  const std::vector<std::shared_ptr<gpu::Device>> devices;  // the CUDA devices the model is on
  const std::unique_ptr<MainGrads> main_grads;              // null: gradients live in .grad
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<transport::Transport> transport;
  bool views;                                         // gradients are views of the buckets
  bool shares_gradients = false;                      // another reducer averages the same gradients
  torch::distributed::autograd::ContextPtr rpc = {};  // of the current backward

 private:
  mutable std::mutex transport_mutex_;
};

}  // namespace torchddp::reducer
