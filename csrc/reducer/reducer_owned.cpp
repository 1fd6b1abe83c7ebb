// Buckets that belong to one rank each: only their owner gets the averages, the others let go of the gradients.
//
// Note [Averages that one rank has]
// After a synchronised backward the owner's .grad is an average, and the others have none. A further backward without zero_grad()
// in between must not be averaged together with it: rank by rank it is there once, not on all. So before autograd adds to such a
// gradient the hook puts it aside, and it is added to the next average. Under no_sync() there is no next average yet, and what
// the user does to .grad meanwhile (zero_grad) would miss what was put aside: that is an error, unless it is all zeros.
#include <ATen/Functions.h>

#include "common/check.h"
#include "kernels/pack.h"
#include "reducer/messages.h"
#include "reducer/reducer_inl.h"

namespace torchddp::reducer {

using bucket::BucketState;

namespace {

// Blocks of lent memory that are kept from step to step. A rank that is ahead of the others borrows more; it must not wait for them in
// the middle of backward, where they may wait for it (a collective of the user's own).
constexpr size_t kKeptBlocks = 8;

}  // namespace

void Reducer::check_owners() const {
  if (!owned_) {
    return;
  }
  TDDP_CHECK(views_ && !config_.wire_dtype,
             "buckets that belong to one rank are views, and travel as reduce_dtype says");
  for (const auto& spec : specs_) {
    TDDP_CHECK(spec.owner >= 0 && spec.owner < transport_->size(), "parameter '", spec.name, "' belongs to rank ",
               spec.owner, ", ranks are 0 to ", transport_->size() - 1);
    TDDP_CHECK(!spec.sparse, "parameter '", spec.name,
               "' has sparse gradients: those can't be reduced to one rank. Make its embedding with sparse=False.");
  }
}

bool Reducer::gives_away(const bucket::Bucket& bucket) const {
  return bucket.owner() >= 0 && bucket.owner() != transport_->rank();
}

void Reducer::lend_memory(bucket::Bucket& bucket) {
  if (!bucket.has_memory()) {
    bucket.take_memory(lent_.take(bucket.bytes(), bucket.buffer().device(), *transport_));
  }
}

void Reducer::pack_given_away(int64_t param, at::Tensor& grad, const at::Tensor* incoming) {
  const auto& place = places_[static_cast<size_t>(param)];
  auto& slot = *place.slot;
  const auto lend = [&] {
    if (!slot.has_memory()) {
      const std::lock_guard lock(launch_mutex_);
      lend_memory(*place.bucket);
    }
  };
  if (!grad.defined()) {
    lend();
    slot.zero();
    return;
  }
  if (!grad.requires_grad() && !slot.has_memory() && bucket::is_unshared(grad, incoming) && slot.adopt(grad)) {
    look_at(param, grad);
    scale_slot(place);
  } else {
    lend();
    copy_into(param, slot, grad);
    if (grad.requires_grad()) {
      warn_create_graph();
    }
  }
  if (rpc_context_ == nullptr) {
    grad.reset();
  }
}

void Reducer::start_reduce(int64_t index) {
  auto& bucket = *buckets_[static_cast<size_t>(index)];
  const auto& wire = bucket.wire();
  if (!config_.reduce_dtype || wire.scalar_type() != at::kFloat || *config_.reduce_dtype == at::kFloat) {
    transport_->reduce(wire, bucket.owner(), bucket.work(), {bucket.scale, std::nullopt, index});
    return;
  }
  const auto dtype = *config_.reduce_dtype;
  const auto numel = wire.numel();
  const auto narrow = lent_.take(numel * static_cast<int64_t>(c10::elementSize(dtype)), wire.device(), *transport_);
  bucket.narrow = narrow.narrow(0, 0, numel * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
  if (wire.device().is_cpu()) {
    kernels::scale_cast(bucket.narrow.mutable_data_ptr(),
                        dtype == at::kHalf ? kernels::DType::kF16 : kernels::DType::kBF16, wire.const_data_ptr(),
                        kernels::DType::kF32, numel, bucket.scale);
  } else {
    const c10::NoGradGuard no_grad;
    bucket.narrow.copy_(wire);
  }
  transport_->reduce(bucket.narrow, bucket.owner(), bucket.work(), {1.0, std::nullopt, index});
}

// The reduction has ended.
void Reducer::finish_owned(bucket::Bucket& bucket) {
  if (!bucket.narrow.defined()) {
    return;
  }
  const auto narrow = std::exchange(bucket.narrow, at::Tensor());
  if (!gives_away(bucket)) {
    const c10::NoGradGuard no_grad;
    bucket.wire().copy_(narrow);
  }
  lent_.give_back(at::empty({0}, narrow.options().dtype(at::kByte))
                      .set_(narrow.storage(), 0, {static_cast<int64_t>(narrow.storage().nbytes())}));
}

void Reducer::let_go(bucket::Bucket& bucket) {
  if (auto memory = bucket.let_go(); memory.defined()) {
    lent_.give_back(std::move(memory));
  }
}

// While backward goes on: the memory serves later gradients. Under launch_mutex_.
void Reducer::let_go_of_finished() {
  if (!owned_ || !overlap_ || gradient_stats_.defined()) {
    return;
  }
  for (; next_let_go_ < next_launch_; ++next_let_go_) {
    auto& bucket = *buckets_[static_cast<size_t>(next_let_go_)];
    if (bucket.state != BucketState::kInFlight) {
      continue;
    }
    if (!bucket.work().poll()) {
      return;
    }
    wait_bucket(next_let_go_);
    if (gives_away(bucket)) {
      let_go(bucket);
    }
  }
}

// See Note [Averages that one rank has].
void Reducer::on_grad_coming(int64_t param) {
  const auto index = static_cast<size_t>(param);
  if (!owned_ || reduced_[index] == 0) {
    return;
  }
  reduced_[index] = 0;
  with_grad(param, [&](at::Tensor& grad) {
    if (!grad.defined()) {
      return;
    }
    const c10::NoGradGuard no_grad;
    if (grad.count_nonzero().item<int64_t>() == 0) {
      grad.reset();
    } else {
      keep_average(param, grad);
    }
  });
}

void Reducer::set_averages(std::vector<uint8_t> averages) {
  TDDP_INTERNAL(averages.size() == params_.size(), averages.size(), " flags for ", params_.size(), " parameters");
  reduced_ = std::move(averages);
}

void Reducer::keep_average(int64_t param, at::Tensor& grad) {
  const auto index = static_cast<size_t>(param);
  if (!armed_.load(std::memory_order_acquire)) {
    reduced_[index] = 1;
    throw std::runtime_error(c10::str("parameter '", specs_[index].name, "' on rank ", transport_->rank(),
                                      ": its gradient was reduced already, and this backward under no_sync() would add "
                                      "to it on its owner alone. Call "
                                      "zero_grad() before accumulating under no_sync()."));
  }
  const auto* slot = places_[index].slot;
  kept_[index] = slot->holds(grad) ? grad.clone() : grad;
  grad.reset();
}

void Reducer::finish_averages() {
  if (!owned_) {
    return;
  }
  lent_.trim(kKeptBlocks);
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto& place = places_[i];
    if (gives_away(*place.bucket)) {
      continue;
    }
    with_grad(static_cast<int64_t>(i), [&](at::Tensor& grad) {
      if (kept_[i].defined()) {
        if (grad.defined()) {
          grad.add_(kept_[i]);
        } else {
          grad = kept_[i];
        }
        kept_[i].reset();
      }
      reduced_[i] = grad.defined() ? 1 : 0;
    });
  }
}

}  // namespace torchddp::reducer
