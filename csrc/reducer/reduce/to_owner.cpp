// Reduces a bucket to the rank that owns it; only the owner gets the averages.
#include <c10/core/GradMode.h>

#include <utility>

#include "kernels/pack.h"
#include "reducer/reduce/reductions.h"

namespace torchddp::reducer {
namespace {

// The values of `wire` times `scale`, in the transport's memory.
at::Tensor narrowed(const at::Tensor& wire, at::ScalarType dtype, double scale, transport::Transport& transport) {
  const auto bytes = wire.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  const auto narrow = transport.scratch().lend(bytes, wire.device()).narrow(0, 0, bytes).view(dtype);
  if (wire.device().is_cpu()) {
    kernels::scale_cast(narrow.mutable_data_ptr(), dtype == at::kHalf ? kernels::DType::kF16 : kernels::DType::kBF16,
                        wire.const_data_ptr(), kernels::DType::kF32, wire.numel(), scale);
  } else {
    narrow.copy_(wire);
  }
  return narrow;
}

class ToOwner final : public Reduction {
 public:
  ToOwner(const Context& context, int64_t index)
      : context_(context), index_(index), work_(context.transport->make_work()) {}

  void start(bucket::Bucket& bucket) override {
    const c10::NoGradGuard no_grad;
    const auto dtype = context_.config.reduce_dtype.value_or(at::kFloat);
    auto wire = bucket.wire();
    transport::SumOptions options{.scale = bucket.take_scale(), .bucket = index_};
    if (wire.scalar_type() == at::kFloat && dtype != at::kFloat) {
      wire = narrow_ = narrowed(wire, dtype, std::exchange(options.scale, 1.0), *context_.transport);
    }
    context_.transport->start(transport::Collective::reduce(wire, bucket.owner(), options), *work_);
  }

  bool poll() override { return work_->poll(); }

  void finish(bucket::Bucket& bucket) override {
    work_->wait(context_.config.timeout);
    const auto narrow = std::exchange(narrow_, at::Tensor());
    if (narrow.defined() && !bucket.is_given_away()) {
      const c10::NoGradGuard no_grad;
      bucket.wire().copy_(narrow);
    }
  }

  void abandon() noexcept override {
    work_->abandon();
    narrow_.reset();
  }

 private:
  const Context& context_;
  const int64_t index_;
  const std::unique_ptr<transport::Work> work_;
  at::Tensor narrow_;  // sent in place of the bucket if it is to be narrower
};

}  // namespace

ReductionPtr make_reduction_to_owner(const Context& context, int64_t index) {
  return std::make_unique<ToOwner>(context, index);
}

}  // namespace torchddp::reducer
