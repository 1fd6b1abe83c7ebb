#include "reducer/reduce/hook.h"

#include <utility>

#include "common/check.h"
#include "reducer/reduce/future_wait.h"
#include "reducer/report/messages.h"

namespace torchddp::reducer {

void HookReduction::start(bucket::Bucket& bucket) {
  const WaitScope waits(events_.live(), "a communication hook that was called", index_);
  auto grad_bucket = make_grad_bucket(index_, count_, bucket, context_.params);
  future_ = hook_.run(grad_bucket);
}

void HookReduction::finish(bucket::Bucket& bucket) {
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
}

}  // namespace torchddp::reducer
