// A bucket that belongs to one rank: only its owner gets the averages.
#pragma once

#include <memory>

#include "reducer/base/context.h"
#include "reducer/reduce/reduction.h"

namespace torchddp::reducer {

class ToOwner final : public Reduction {
 public:
  ToOwner(const Context& context, int64_t index)
      : context_(context), index_(index), work_(context.transport->make_work()) {}

  void start(bucket::Bucket& bucket) override;
  bool poll() override { return work_->poll(); }
  void finish(bucket::Bucket& bucket) override;
  void abandon() noexcept override;

 private:
  const Context& context_;
  const int64_t index_;
  const std::unique_ptr<transport::Work> work_;
  at::Tensor narrow_;  // what travels in the place of the bucket, if that is to be narrower
};

}  // namespace torchddp::reducer
