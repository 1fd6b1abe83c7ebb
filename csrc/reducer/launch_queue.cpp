#include "reducer/launch_queue.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <span>

#include "common/check.h"
#include "reducer/parts.h"
#include "reducer/report/messages.h"

namespace torchddp::reducer {

using bucket::BucketState;

namespace {

// A torch.profiler range around work on one bucket: "torchddp.launch bucket 3 (4194304 bytes: 'head.weight', 'norm.bias' and 7
// more)". Takes nanoseconds while no profiler runs.
class BucketRange {
 public:
  BucketRange(const char* what, int64_t index, const bucket::Bucket& bucket, std::span<const plan::ParamSpec> specs)
      : guard_(at::RecordScope::USER_SCOPE) {
    if (guard_.isActive()) [[unlikely]] {
      guard_.before(c10::str("torchddp.", what, " bucket ", index, " (", bucket.bytes(),
                             " bytes: ", list_names(bucket.params(), specs, 2), ")"));
    }
  }

 private:
  at::RecordFunction guard_;
};

}  // namespace

LaunchQueue::LaunchQueue(Parts& parts) : parts_(parts), skips_(parts.context.config.skip_all_reduce_unused_params) {}

bool LaunchQueue::ready(int64_t index, int64_t last, const at::Tensor* incoming) {
  const std::lock_guard lock(mutex_);
  if (!parts_.step.armed()) [[unlikely]] {
    return false;  // the step was abandoned in the meantime
  }
  parts_.packers.complete(index, last, incoming);
  parts_.layout.bucket(index).advance(BucketState::kReady);
  parts_.events.packed(index);
  const auto count = parts_.layout.size();
  if (++num_ready_ < count && !overlap_) return false;
  while (next_launch_ < count && parts_.layout.bucket(next_launch_).state() == BucketState::kReady) {
    launch(next_launch_++);
  }
  finish_early();
  if (next_launch_ < count) return false;
  if (parts_.used.are_exchanged()) parts_.used.start_reduction();
  return true;
}

void LaunchQueue::launch(int64_t index) {
  agree();
  auto& bucket = parts_.layout.bucket(index);
  auto& reduction = parts_.layout.reduction(index);
  if (can_skip(bucket)) {
    reduction.abandon();  // drop what the packer has already requested from it
    bucket.advance(BucketState::kSkipped);
    return;
  }
  const BucketRange range("launch", index, bucket, parts_.context.specs);
  parts_.events.launching(index, bucket);
  parts_.packers.follow(index);
  const auto bytes = bucket.is_sparse() ? transport::bytes_of(bucket.buffer()) : bucket.bytes();
  const auto before = parts_.context.transport->traffic();
  described([&] { return where(index); }, [&] { reduction.start(bucket); });
  TDDP_INTERNAL(!bucket.owes_scale(), "bucket ", index, " was reduced without its factor");
  const auto operation = parts_.context.transport->traffic() - before;
  parts_.events.launched(bytes, reduction.hides_operation() ? nullptr : &operation);
  bucket.advance(BucketState::kInFlight);
}

bool LaunchQueue::can_skip(const bucket::Bucket& bucket) const {
  return skips_ && std::ranges::all_of(bucket.params(), [&](int64_t param) {
           return parts_.step.mark_of(param) == Mark::kUnused &&
                  !(parts_.used.are_known() && parts_.used.is_used_here(param));
         });
}

// Runs during backward, so that the memory of finished buckets with an owner can serve later gradients.
void LaunchQueue::finish_early() {
  const bool read_at_end = parts_.context.config.gradient_stats || parts_.context.config.raise_non_finite;
  if (!parts_.context.owned || !overlap_ || read_at_end) return;
  for (; next_finish_ < next_launch_; ++next_finish_) {
    auto& bucket = parts_.layout.bucket(next_finish_);
    if (bucket.state() != BucketState::kInFlight) continue;
    if (!parts_.layout.reduction(next_finish_).poll()) return;
    finish(next_finish_);
    if (bucket.is_given_away()) bucket.release_memory();
  }
}

void LaunchQueue::finish(int64_t index) {
  const c10::NoGradGuard no_grad;
  auto& bucket = parts_.layout.bucket(index);
  const BucketRange range("wait", index, bucket, parts_.context.specs);
  const WaitScope waits(parts_.events.live(), "the reduction", index);
  parts_.events.wait_begins(index);
  described([&] { return where(index); }, [&] { parts_.layout.reduction(index).finish(bucket); });
  parts_.weights.correct(bucket);
  bucket.advance(BucketState::kReduced);
  parts_.events.reduced(index);
}

void LaunchQueue::abandon() {
  const std::lock_guard lock(mutex_);
  parts_.step.end();
  parts_.layout.abandon();
  parts_.layout.retire();
  parts_.used.abandon();
  parts_.weights.abandon();
}

std::string LaunchQueue::where(int64_t index) const {
  return transport_failure_message(parts_.context, parts_.events.steps(), index, parts_.layout.size(),
                                   parts_.layout.bucket(index).params());
}

}  // namespace torchddp::reducer
