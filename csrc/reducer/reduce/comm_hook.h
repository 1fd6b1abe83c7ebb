// Communication hooks, user-defined and built-in, with torch's own types.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>

#include <memory>
#include <span>

#include "bucket/bucket.h"

namespace torchddp::reducer {

class CommHook {
 public:
  explicit operator bool() const { return hook_ != nullptr; }

  // At most one hook per reducer, installed before the first backward.
  void install(std::unique_ptr<c10d::CommHookInterface> hook);
  void install_builtin(c10d::BuiltinCommHookType type, const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& bucket) const { return hook_->runHook(bucket); }
  // Waits, then takes the tensor from the future: the bucket's new values, the same number as the hook was given.
  at::Tensor wait(c10::ivalue::Future& future) const;

 private:
  std::unique_ptr<c10d::CommHookInterface> hook_;
};

// torch's view of a bucket, in which complex gradients are pairs of real numbers. `buffer`, if given, replaces the bucket's
// memory (a joined rank sends zeros).
c10d::GradBucket make_grad_bucket(int64_t index, int64_t bucket_count, const bucket::Bucket& bucket,
                                  std::span<const at::Tensor> params,
                                  const std::optional<at::Tensor>& buffer = std::nullopt);

}  // namespace torchddp::reducer
