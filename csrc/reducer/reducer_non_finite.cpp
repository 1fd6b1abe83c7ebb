// Where gradients that are not finite come from: see NonFiniteLog.
//
// Note [Non-finite averages]
// Ranks need not tell each other that a step went wrong: a NaN or an infinity of one rank makes the average NaN or infinite on all, with
// the same bits, and so does a sum that overflows. Each rank looks at the averages, which say the same everywhere. Where the transport has
// looked at all of them while it summed, only those of a bucket with a bad one are read again, to name parameters.
#include <utility>

#include "bucket/tensor_checks.h"
#include "reducer/messages.h"
#include "reducer/reducer_inl.h"

namespace torchddp::reducer {

void Reducer::look_at(int64_t param, const at::Tensor& grad) {
  if (non_finite_ == nullptr) {
    return;
  }
  if (const auto count = bucket::count_non_finite(grad); count > 0) [[unlikely]] {
    non_finite_->note(stats_.steps, param, count);
  }
}

// Whether the reduction of a bucket can look for what is not finite.
bool Reducer::sums_tell(const bucket::Bucket& bucket) const {
  return !comm_hook_ && !owned_ && !config_.wire_dtype &&
         transport_->counts_non_finite(bucket.wire());
}

// A gradient that nobody copies: a pass over it would be one more, so the reduction looks at it where it can.
void Reducer::look_in_flight(int64_t param, const at::Tensor& grad) {
  if (non_finite_ == nullptr) {
    return;
  }
  auto& bucket = *places_[static_cast<size_t>(param)].bucket;
  bucket.counts_in_flight = bucket.params().size() == 1 && sums_tell(bucket);
  if (!bucket.counts_in_flight) {
    look_at(param, grad);
  }
}

void Reducer::collect_in_flight(bucket::Bucket& bucket) {
  if (!std::exchange(bucket.counts_in_flight, false)) {
    return;
  }
  if (const auto count = bucket.work().non_finite(); count > 0) [[unlikely]] {
    non_finite_->note(stats_.steps, bucket.params().front(), count);
  }
}

// The average of a bucket has arrived.
void Reducer::look_at_average(int64_t index) {
  if (!config_.raise_non_finite) {
    return;
  }
  auto& bucket = *buckets_[static_cast<size_t>(index)];
  if (std::exchange(bucket.checks_in_flight, false) && bucket.work().sums_finite()) [[likely]] {
    return;
  }
  const auto& average = bucket.is_sparse() ? bucket.buffer()._values() : bucket.wire();
  if (bucket::count_non_finite(average) == 0) [[likely]] {
    return;
  }
  for (size_t i = 0; i < bucket.params().size(); ++i) {
    const auto param = bucket.params()[i];
    const auto numel = specs_[static_cast<size_t>(param)].numel;
    if (bucket.is_sparse() || bucket::count_non_finite(bucket.buffer().narrow(0, bucket.offsets()[i], numel)) > 0) {
      bad_averages_.push_back(param);
    }
  }
}

void Reducer::raise_non_finite() {
  if (bad_averages_.empty()) {
    return;
  }
  const auto bad = std::exchange(bad_averages_, {});
  std::vector<int64_t> own;
  for (const auto& found : non_finite_->episode()) {
    if (found.step == stats_.steps) {
      own.push_back(found.param);
    }
  }
  throw NonFiniteError(non_finite_message(transport_->rank(), stats_.steps, bad, own, specs_));
}

std::vector<NonFiniteGrad> Reducer::non_finite() {
  return non_finite_ != nullptr ? non_finite_->episode() : std::vector<NonFiniteGrad>();
}

int64_t Reducer::non_finite_version() { return non_finite_ != nullptr ? non_finite_->version() : 0; }

}  // namespace torchddp::reducer
