#include "reducer/reduce/all_reduce.h"

#include <utility>

namespace torchddp::reducer {

transport::SumOptions AllReduce::options(const Context& context, int64_t index) {
  return {.wire = context.transport->capabilities().narrows ? context.config.wire_dtype : std::nullopt,
          .bucket = index};
}

bool AllReduce::sums_tell(const bucket::Bucket& bucket) const {
  return !context_.config.wire_dtype && context_.transport->counts_non_finite(bucket.wire());
}

bool AllReduce::counts_non_finite(const bucket::Bucket& bucket) {
  counts_input_ = bucket.params().size() == 1 && sums_tell(bucket);
  return counts_input_;
}

void AllReduce::start(bucket::Bucket& bucket) {
  checks_sums_ = context_.config.raise_non_finite && sums_tell(bucket);
  auto options = AllReduce::options(context_, index_);
  options.scale = bucket.scale;
  options.count_non_finite = counts_input_ || checks_sums_;
  context_.transport->start(transport::Collective::all_reduce(bucket.wire(), options), *work_);
}

void AllReduce::finish(bucket::Bucket& bucket) {
  work_->wait(context_.config.timeout);
  if (std::exchange(counts_input_, false)) {
    non_finite_.note(bucket.params().front(), work_->non_finite());
  }
}

void AllReduce::abandon() noexcept {
  work_->abandon();
  counts_input_ = checks_sums_ = false;
}

bool AllReduce::is_known_finite() { return std::exchange(checks_sums_, false) && work_->sums_finite(); }

}  // namespace torchddp::reducer
