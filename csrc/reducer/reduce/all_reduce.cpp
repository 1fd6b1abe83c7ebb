// The default reduction: an all-reduce of the bucket in place.
#include <utility>

#include "reducer/reduce/reductions.h"

namespace torchddp::reducer {
namespace {

class AllReduce final : public Reduction {
 public:
  AllReduce(const Context& context, NonFiniteWatch& non_finite, int64_t index)
      : context_(context), non_finite_(non_finite), index_(index), work_(context.transport->make_work()) {}

  bool counts_non_finite(const bucket::Bucket& bucket) override {
    counts_input_ = bucket.params().size() == 1 && sums_tell(bucket);
    return counts_input_;
  }

  void start(bucket::Bucket& bucket) override {
    checks_sums_ = context_.config.raise_non_finite && sums_tell(bucket);
    auto options = all_reduce_options(context_, index_);
    const auto scale = bucket.take_scale();
    options.scale = bucket.apart().empty() ? scale : 1.0;
    options.count_non_finite = counts_input_ || checks_sums_;
    const transport::Alongside others{bucket.apart(), scale};
    context_.transport->start(transport::Collective::all_reduce(bucket.wire(), options, others), *work_);
  }

  bool poll() override { return work_->poll(); }

  void finish(bucket::Bucket& bucket) override {
    work_->wait(context_.config.timeout);
    if (std::exchange(counts_input_, false)) {
      non_finite_.note(bucket.params().front(), work_->non_finite());
    }
  }

  bool is_known_finite() override { return std::exchange(checks_sums_, false) && work_->sums_finite(); }

  void abandon() noexcept override {
    work_->abandon();
    counts_input_ = checks_sums_ = false;
  }

 private:
  // Whether the transport can check for non-finite values while it sums.
  bool sums_tell(const bucket::Bucket& bucket) const {
    return bucket.apart().empty() && context_.transport->counts_non_finite(bucket.wire());
  }

  const Context& context_;
  NonFiniteWatch& non_finite_;
  const int64_t index_;
  const std::unique_ptr<transport::Work> work_;
  bool counts_input_ = false;
  bool checks_sums_ = false;
};

}  // namespace

ReductionPtr make_all_reduce(const Context& context, NonFiniteWatch& non_finite, int64_t index) {
  return std::make_unique<AllReduce>(context, non_finite, index);
}

transport::SumOptions all_reduce_options(const Context& context, int64_t index) {
  return {.outer_dtype = context.transport->capabilities().narrows ? context.config.wire_dtype : std::nullopt,
          .bucket = index};
}

}  // namespace torchddp::reducer
