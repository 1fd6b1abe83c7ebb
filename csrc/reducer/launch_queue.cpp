#include "reducer/launch_queue.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "common/check.h"
#include "reducer/report/events.h"
#include "reducer/report/messages.h"

namespace torchddp::reducer {

using bucket::BucketState;

bool LaunchQueue::ready(int64_t index, int64_t last, const at::Tensor* incoming) {
  const std::lock_guard lock(mutex_);
  if (!step_.armed()) [[unlikely]] {
    return false;  // the step was abandoned in the meantime
  }
  packers_.complete(index, last, incoming);
  layout_.bucket(index).advance(BucketState::kReady);
  events_.packed(index);
  const auto count = layout_.size();
  if (++num_ready_ < count && !overlap_) {
    return false;
  }
  while (next_launch_ < count && layout_.bucket(next_launch_).state() == BucketState::kReady) {
    launch(next_launch_++);
  }
  finish_early();
  if (next_launch_ < count) {
    return false;
  }
  if (used_.are_searched()) {
    used_.start_reduction();
  }
  return true;
}

void LaunchQueue::agree() {
  if (agree_) [[unlikely]] {
    agree_();
    agree_ = nullptr;
  }
}

void LaunchQueue::launch(int64_t index) {
  agree();
  auto& bucket = layout_.bucket(index);
  auto& reduction = layout_.reduction(index);
  if (can_skip(bucket)) {
    reduction.abandon();  // drop what the packer has already requested from it
    bucket.advance(BucketState::kSkipped);
    return;
  }
  const BucketRange range("launch", index, bucket, context_.specs);
  events_.launching(index, bucket);
  packers_.follow(index);
  const auto bytes = bucket.is_sparse() ? transport::bytes_of(bucket.buffer()) : bucket.bytes();
  const auto before = context_.transport->traffic();
  described([&](const std::string& reason) { return failed(index, reason); }, [&] { reduction.start(bucket); });
  TDDP_INTERNAL(!bucket.owes_scale(), "bucket ", index, " was reduced without its factor");
  const auto operation = context_.transport->traffic() - before;
  events_.launched(bytes, reduction.goes_unseen() ? nullptr : &operation);
  bucket.advance(BucketState::kInFlight);
}

bool LaunchQueue::can_skip(const bucket::Bucket& bucket) const {
  return skips_ && std::all_of(bucket.params().begin(), bucket.params().end(), [&](int64_t param) {
           return step_.mark_of(param) == Mark::kUnused && !(used_.are_known() && used_.is_used_here(param));
         });
}

// Runs during backward, so that the memory of finished buckets with an owner can serve later gradients.
void LaunchQueue::finish_early() {
  const bool read_at_end = context_.config.gradient_stats || context_.config.raise_non_finite;
  if (!context_.owned || !overlap_ || read_at_end) {
    return;
  }
  for (; next_finish_ < next_launch_; ++next_finish_) {
    auto& bucket = layout_.bucket(next_finish_);
    if (bucket.state() != BucketState::kInFlight) {
      continue;
    }
    if (!layout_.reduction(next_finish_).poll()) {
      return;
    }
    finish(next_finish_);
    if (bucket.is_given_away()) {
      bucket.release_memory();
    }
  }
}

void LaunchQueue::finish(int64_t index) {
  const c10::NoGradGuard no_grad;
  auto& bucket = layout_.bucket(index);
  const BucketRange range("wait", index, bucket, context_.specs);
  const WaitScope waits(events_.live(), "the reduction", index);
  events_.wait_begins(index);
  described([&](const std::string& reason) { return failed(index, reason); },
            [&] { layout_.reduction(index).finish(bucket); });
  weights_.correct(bucket);
  bucket.advance(BucketState::kReduced);
  events_.reduced(index);
}

void LaunchQueue::abandon() {
  const std::lock_guard lock(mutex_);
  step_.end();
  layout_.abandon();
  layout_.retire();
  used_.abandon();
  weights_.abandon();
}

std::string LaunchQueue::failed(int64_t index, const std::string& reason) const {
  return transport_failure_message(context_.rank(), events_.steps(), index, layout_.size(),
                                   layout_.bucket(index).params(), context_.specs, reason);
}

}  // namespace torchddp::reducer
