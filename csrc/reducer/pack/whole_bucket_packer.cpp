#include "reducer/pack/whole_bucket_packer.h"

#include <c10/core/GradMode.h>

namespace torchddp::reducer {

WholeBucketPacker::WholeBucketPacker(const PackRules& rules) : rules_(rules), device_(rules.context.device.get()) {
  if (device_ != nullptr) {
    fork_ = device_->make_event();
  }
}

WholeBucketPacker::~WholeBucketPacker() {
  if (fork_ != nullptr) {
    device_->destroy_event(fork_);
  }
}

void WholeBucketPacker::begin_step() {
  streams_.resize(static_cast<size_t>(rules_.layout.size()));
  for (auto& streams : streams_) {
    streams.producers.clear();
  }
}

void WholeBucketPacker::note_stream(int64_t bucket) {
  if (device_ != nullptr) {
    auto* const stream = device_->current_stream();
    const std::lock_guard lock(mutex_);
    streams_[static_cast<size_t>(bucket)].producers.add(stream);
  }
}

void WholeBucketPacker::pack(int64_t index, int64_t last, const at::Tensor* incoming) {
  const c10::NoGradGuard no_grad;
  auto& bucket = rules_.layout.bucket(index);
  auto& streams = streams_[static_cast<size_t>(index)];
  if (device_ != nullptr) {
    streams.packed_on = device_->current_stream();
    streams.producers.join_into(*device_, streams.packed_on, fork_);
  }
  rules_.layout.lend_memory(bucket);
  bucket::DevicePieces pieces(bucket::DevicePieces::Direction::kPack, rules_.step.scale());
  if (!rules_.context.is_captured()) {  // a replay would do it again, for whoever held gradients then
    leave_to_holders(bucket);
    look_at_all(bucket);
  }
  for (const auto param : bucket.params()) {
    rules_.context.with_grad(
        param, [&](at::Tensor& grad) { gather(param, bucket, grad, param == last ? incoming : nullptr, pieces); });
  }
  pieces.run();
  if (device_ != nullptr) {
    streams.producers.wait_back(*device_, streams.packed_on, fork_);
  }
}

void WholeBucketPacker::gather(int64_t param, bucket::Bucket& bucket, at::Tensor& grad, const at::Tensor* incoming,
                               bucket::DevicePieces& pieces) const {
  auto& slot = *rules_.layout.place(param).slot;
  const bool unused = rules_.step.mark_of(param) == Mark::kUnused;
  if (!grad.defined()) {
    slot.zero();
    if (!bucket.is_given_away()) {
      rules_.step.add_late(param);
    }
    return;
  }
  if (slot.holds(grad)) {
    if (unused) {
      rules_.step.add_late(param, slot.clone());
    }
    if (rules_.step.scale() != 1.0) {
      pieces.add(slot, grad);
    }
    return;
  }
  rules_.check(param, grad);
  slot.restore_view();
  const bool replaced = rules_.becomes_view(grad, unused, incoming);  // before `pieces` shares it
  pieces.add(slot, grad.detach());
  if (bucket.is_given_away()) {
    grad.reset();
  } else if (replaced) {
    grad = slot.view();
  } else if (rules_.context.views) {  // otherwise HandBack copies the average back
    rules_.stays(param, grad);
  }
}

void WholeBucketPacker::leave_to_holders(const bucket::Bucket& bucket) const {
  for (const auto param : bucket.params()) {
    const auto& place = rules_.layout.place(param);
    rules_.context.with_grad(param, [&](const at::Tensor& grad) {
      if (!grad.defined() || !place.slot->holds(grad)) {
        rules_.leave_to_holders(place);
      }
    });
  }
}

void WholeBucketPacker::look_at_all(const bucket::Bucket& bucket) const {
  if (!rules_.non_finite.on()) {
    return;
  }
  std::vector<int64_t> params;
  std::vector<at::Tensor> grads;
  for (const auto param : bucket.params()) {
    rules_.context.with_grad(param, [&](const at::Tensor& grad) {
      if (grad.defined()) {
        params.push_back(param);
        grads.push_back(grad.detach());
      }
    });
  }
  rules_.non_finite.look_at(params, grads);
}

void WholeBucketPacker::follow(int64_t index) {
  if (device_ == nullptr || rules_.layout.bucket(index).is_sparse()) {
    return;
  }
  auto* const current = device_->current_stream();
  auto* const packed_on = streams_[static_cast<size_t>(index)].packed_on;
  if (current != packed_on) {
    device_->record(fork_, packed_on);
    device_->wait(current, fork_);
  }
}

}  // namespace torchddp::reducer
