// Reduces a bucket with a communication hook.
#include <utility>

#include "common/check.h"
#include "reducer/reduce/future_wait.h"
#include "reducer/reduce/reductions.h"
#include "reducer/report/messages.h"

namespace torchddp::reducer {
namespace {

class HookReduction final : public Reduction {
 public:
  HookReduction(const Context& context, const CommHook& hook, const StepEvents& events, int64_t index, int64_t count)
      : context_(context), hook_(hook), events_(events), index_(index), count_(count) {}

  void start(bucket::Bucket& bucket) override {
    const WaitScope waits(events_.live(), "a communication hook that was called", index_);
    if (const auto scale = bucket.take_scale(); scale != 1.0) {
      bucket.wire().mul_(scale);
    }
    auto grad_bucket = make_grad_bucket(index_, count_, bucket, context_.params);
    future_ = hook_.run(grad_bucket);
  }

  bool poll() override { return future_ == nullptr || future_->completed(); }

  void finish(bucket::Bucket& bucket) override {
    const auto future = std::exchange(future_, nullptr);
    TDDP_CHECK(future != nullptr, "the communication hook returned no future for bucket ", index_, " on rank ",
               context_.rank(), ": it must return a torch.futures.Future that holds one tensor");
    wait_for_future(context_, *future, "the communication hook's future");
    const auto result = hook_.wait(*future);
    const auto& flat = bucket.wire();
    if (bucket.is_sparse()) {
      if (!result.is_same(flat)) {
        flat.copy_(result);
      }
      return;
    }
    TDDP_CHECK(result.numel() == flat.numel(), "the communication hook returned ", result.numel(),
               " elements for bucket ", index_, " on rank ", context_.rank(), ", which has ", flat.numel(),
               " (parameters ", list_names(bucket.params(), context_.specs), ")");
    if (!result.is_alias_of(flat)) {
      flat.copy_(result.view_as(flat));
    }
    bucket.clear_padding();
  }

  void abandon() noexcept override { future_.reset(); }
  bool goes_unseen() const override { return true; }

 private:
  const Context& context_;
  const CommHook& hook_;
  const StepEvents& events_;
  const int64_t index_, count_;  // of all buckets
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace

ReductionPtr make_hook_reduction(const Context& context, const CommHook& hook, const StepEvents& events, int64_t index,
                                 int64_t count) {
  return std::make_unique<HookReduction>(context, hook, events, index, count);
}

}  // namespace torchddp::reducer
