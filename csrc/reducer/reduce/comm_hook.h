// Communication hooks, user-defined and built-in, with torch's own types; and their futures, which may never complete.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>

#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "bucket/bucket.h"
#include "common/check.h"
#include "reducer/base/context.h"
#include "reducer/report/events.h"

namespace torchddp::reducer {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

class CommHook {
 public:
  explicit operator bool() const { return hook_ != nullptr; }

  // At most one hook per reducer, installed before the first backward.
  void install(std::unique_ptr<c10d::CommHookInterface> hook) {
    TDDP_CHECK(hook_ == nullptr, "register_comm_hook or register_builtin_comm_hook can only be called once.");
    hook_ = std::move(hook);
  }
  void install_builtin(c10d::BuiltinCommHookType type, const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  FuturePtr run(c10d::GradBucket& bucket) const { return hook_->runHook(bucket); }
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

// Returns once it is complete, successfully or not. After the time limit of the module or its group, throws a TransportError
// that names `what`.
void wait_for_future(const Context& context, c10::ivalue::Future& future, const char* what);

// Those that communication hooks queued for the end of backward (torch's _install_post_backward_futures).
class QueuedFutures {
 public:
  QueuedFutures(const Context& context, const StepEvents& events) : context_(context), events_(events) {}

  // Thread-safe.
  void add(const std::vector<FuturePtr>& futures) {
    const std::lock_guard lock(mutex_);
    futures_.insert(futures_.end(), futures.begin(), futures.end());
  }
  // Waits for all of them and throws the first error.
  void wait();
  void abandon() { take(); }

 private:
  std::vector<FuturePtr> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(futures_, {});
  }

  const Context& context_;
  const StepEvents& events_;
  std::mutex mutex_;
  std::vector<FuturePtr> futures_;
};

}  // namespace torchddp::reducer
