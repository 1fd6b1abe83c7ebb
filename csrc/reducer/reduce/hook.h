// A bucket that a communication hook reduces.
#pragma once

#include "reducer/base/context.h"
#include "reducer/reduce/comm_hook.h"
#include "reducer/reduce/reduction.h"
#include "reducer/report/events.h"

namespace torchddp::reducer {

class HookReduction final : public Reduction {
 public:
  // `count`: of all buckets.
  HookReduction(const Context& context, const CommHook& hook, const StepEvents& events, int64_t index, int64_t count)
      : context_(context), hook_(hook), events_(events), index_(index), count_(count) {}

  void start(bucket::Bucket& bucket) override;
  bool poll() override { return future_ == nullptr || future_->completed(); }
  void finish(bucket::Bucket& bucket) override;
  void abandon() noexcept override { future_.reset(); }
  bool goes_unseen() const override { return true; }

 private:
  const Context& context_;
  const CommHook& hook_;
  const StepEvents& events_;
  const int64_t index_, count_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace torchddp::reducer
