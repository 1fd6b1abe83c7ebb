// The ordinary reduction: an all-reduce of the bucket, where it lies.
#pragma once

#include <memory>

#include "reducer/base/context.h"
#include "reducer/reduce/reduction.h"
#include "reducer/report/non_finite_watch.h"

namespace torchddp::reducer {

class AllReduce final : public Reduction {
 public:
  AllReduce(const Context& context, NonFiniteWatch& non_finite, int64_t index)
      : context_(context), non_finite_(non_finite), index_(index), work_(context.transport->make_work()) {}

  // As every rank must give them for bucket `index`, also one that takes part without gradients.
  static transport::SumOptions options(const Context& context, int64_t index);

  void start(bucket::Bucket& bucket) override;
  bool poll() override { return work_->poll(); }
  void finish(bucket::Bucket& bucket) override;
  void abandon() noexcept override;
  bool counts_non_finite(const bucket::Bucket& bucket) override;
  bool is_known_finite() override;

 private:
  // Whether the transport can look for what is not finite while it sums.
  bool sums_tell(const bucket::Bucket& bucket) const;

  const Context& context_;
  NonFiniteWatch& non_finite_;
  const int64_t index_;
  const std::unique_ptr<transport::Work> work_;
  bool counts_input_ = false;
  bool checks_sums_ = false;
};

}  // namespace torchddp::reducer
