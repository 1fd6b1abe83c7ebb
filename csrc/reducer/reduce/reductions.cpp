#include "reducer/reduce/reductions.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "kernels/pack.h"
#include "transport/scaling.h"

namespace torchddp::reducer {

namespace {

// The default: an all-reduce of the bucket in place.
class AllReduce final : public Reduction {
 public:
  AllReduce(const Context& context, NonFiniteWatch& non_finite, int64_t index)
      : Reduction(Scaling::kInFlight), context_(context), non_finite_(non_finite), index_(index),
        work_(context.transport->make_work()) {}

  bool counts_non_finite(const bucket::Bucket& bucket) override {
    counts_input_ = bucket.params().size() == 1 && transport_checks(bucket);
    return counts_input_;
  }

  void begin(bucket::Bucket& bucket, double scale) override {
    checks_sums_ = context_.config.raise_non_finite && transport_checks(bucket);
    auto options = all_reduce_options(context_, index_);
    options.scale = bucket.in_place().empty() ? scale : 1.0;
    options.count_non_finite = counts_input_ || checks_sums_;
    const transport::InPlace in_place{bucket.in_place(), scale};
    context_.transport->start(transport::Collective::all_reduce(bucket.wire(), options, in_place), *work_);
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
  bool transport_checks(const bucket::Bucket& bucket) const {
    return bucket.in_place().empty() && context_.transport->counts_non_finite(bucket.wire());
  }

  const Context& context_;
  NonFiniteWatch& non_finite_;
  const int64_t index_;
  const std::unique_ptr<transport::Work> work_;
  bool counts_input_ = false;
  bool checks_sums_ = false;
};

// A sparse gradient: as a whole, or only its values where ranks have agreed on row ids.
class SparseReduction final : public Reduction {
 public:
  explicit SparseReduction(const Context& context)
      : Reduction(Scaling::kBefore), context_(context), work_(context.transport->make_work()) {}

  void begin(bucket::Bucket& bucket, double /*scale*/) override {
    const auto tensor = bucket.row_ids() ? bucket.buffer()._values() : bucket.wire();
    context_.transport->start(transport::Collective::all_reduce(tensor), *work_);
  }
  bool poll() override { return work_->poll(); }
  void finish(bucket::Bucket& /*bucket*/) override { work_->wait(context_.config.timeout); }
  void abandon() noexcept override { work_->abandon(); }

 private:
  const Context& context_;
  const std::unique_ptr<transport::Work> work_;
};

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

// To the rank that owns the bucket, which alone gets the averages.
class ToOwner final : public Reduction {
 public:
  ToOwner(const Context& context, int64_t index)
      : Reduction(Scaling::kInFlight), context_(context), index_(index), work_(context.transport->make_work()) {}

  void begin(bucket::Bucket& bucket, double scale) override {
    const c10::NoGradGuard no_grad;
    const auto dtype = context_.config.reduce_dtype.value_or(at::kFloat);
    auto wire = bucket.wire();
    transport::SumOptions options{.scale = scale, .bucket = index_};
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

transport::SumOptions all_reduce_options(const Context& context, int64_t index) {
  return {.outer_dtype = context.transport->capabilities().narrows ? context.config.wire_dtype : std::nullopt,
          .bucket = index};
}

void Reduction::start(bucket::Bucket& bucket) {
  auto scale = bucket.take_scale();
  if (scale != 1.0 && scaling_ == Scaling::kBefore) {
    transport::scale_by(bucket.wire(), scale);
    scale = 1.0;
  }
  begin(bucket, scale);
}

int64_t Reductions::in_place_bytes() const {
  const auto& transport = context_.transport->capabilities();
  const bool pays = transport.scales_in_place || context_.config.pack_whole_buckets;
  const bool can = context_.packs_whole_buckets() && context_.has_own_storage() && !context_.owned && !hook_ &&
                   !context_.shares_gradients && transport.sums_in_place && pays;
  return can ? context_.config.in_place_bytes : 0;
}

ReductionPtr Reductions::make(const bucket::Bucket& bucket, int64_t index, int64_t count) const {
  if (hook_) return make_hook_reduction(context_, hook_, events_, index, count);
  if (bucket.is_sparse()) return std::make_unique<SparseReduction>(context_);
  if (context_.owned) return std::make_unique<ToOwner>(context_, index);
  return std::make_unique<AllReduce>(context_, non_finite_, index);
}

}  // namespace torchddp::reducer
