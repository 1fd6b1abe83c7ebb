#include "reducer/pack/packers.h"

#include <c10/core/GradMode.h>

namespace torchddp::reducer {

void WholeBucketPacker::begin_step() {
  came_unshared_.assign(rules_.context.params.size(), 0);
  streams_.resize(rules_.layout.size());
  for (size_t i = 0; i < streams_.size(); ++i) {
    const auto& bucket = rules_.layout.bucket(static_cast<int64_t>(i));
    const auto device = bucket.is_sparse() ? nullptr : rules_.context.device_of(bucket.params().front());
    auto& streams = streams_[i];
    if (device == nullptr) {
      streams.reset();
    } else if (streams == nullptr || streams->device() != device.get()) {
      streams = std::make_unique<gpu::BucketStreams>(device);
    } else {
      streams->begin_step();
    }
  }
}

void WholeBucketPacker::end_step() {
  for (const auto& streams : streams_) {
    if (streams != nullptr) streams->finish();
  }
}

void WholeBucketPacker::pack(int64_t index, int64_t last, const at::Tensor* incoming) {
  const c10::NoGradGuard no_grad;
  auto& bucket = rules_.layout.bucket(index);
  auto* const streams = this->streams(index);
  if (streams != nullptr) streams->begin_packing();
  rules_.layout.lend_memory(bucket);
  bucket::DevicePieces pieces(bucket::DevicePieces::Direction::kPack, rules_.step.scale());
  if (!rules_.context.is_captured()) {  // a replay would repeat it for whoever held gradients at capture
    leave_to_holders(bucket);
    look_at_all(bucket);
  }
  for (const auto param : bucket.params()) {
    rules_.context.with_grad(
        param, [&](at::Tensor& grad) { gather(param, bucket, grad, param == last ? incoming : nullptr, pieces); });
  }
  pieces.run();
  if (!bucket.in_place().empty()) bucket.leave_scale(rules_.step.scale());
  if (streams != nullptr) streams->end_packing();
}

void WholeBucketPacker::gather(int64_t param, bucket::Bucket& bucket, at::Tensor& grad, const at::Tensor* incoming,
                               bucket::DevicePieces& pieces) const {
  auto& slot = *rules_.layout.place(param).slot;
  if (slot.is_in_place()) {
    leave_in_place(param, slot, grad, incoming, pieces);
    return;
  }
  const bool unused = rules_.step.mark_of(param) == Mark::kUnused;
  if (!grad.defined()) {
    slot.zero();
    return;
  }
  if (slot.holds(grad)) {
    if (unused) {
      rules_.step.add_late(param, grad.detach().clone());
    } else {
      rules_.packed.note(param, grad, /*in_place=*/true);
    }
    if (rules_.step.scale() != 1.0) pieces.add(slot, grad);
    return;
  }
  rules_.check(param, grad);
  pieces.add(slot, grad);
  if (bucket.is_given_away()) {
    if (unused) rules_.step.add_late(param, grad);
    grad.reset();
  } else {
    rules_.copied(param, grad, unused);
  }
}

void WholeBucketPacker::leave_in_place(int64_t param, bucket::GradSlot& slot, at::Tensor& grad,
                                       const at::Tensor* incoming, bucket::DevicePieces& pieces) const {
  const bool unused = rules_.step.mark_of(param) == Mark::kUnused;
  const auto& bucket = *rules_.layout.place(param).bucket;
  if (grad.defined() && came_unshared_[param] != 0 && rules_.may_adopt(bucket, grad, unused, incoming) &&
      slot.adopt(grad)) {
    rules_.packed.note(param, grad, /*in_place=*/true);
    return;
  }
  slot.take_fresh_memory();
  if (!grad.defined()) {
    slot.zero();
    return;
  }
  rules_.check(param, grad);
  pieces.copy(slot, grad);
  rules_.copied(param, grad, unused);
}

void WholeBucketPacker::leave_to_holders(const bucket::Bucket& bucket) const {
  for (const auto param : bucket.params()) {
    const auto& place = rules_.layout.place(param);
    rules_.context.with_grad(param, [&](const at::Tensor& grad) {
      if (!grad.defined() || rules_.packed.shows_own() || !place.slot->holds(grad)) rules_.leave_to_holders(place);
    });
  }
}

void WholeBucketPacker::look_at_all(const bucket::Bucket& bucket) const {
  if (!rules_.non_finite.on()) return;
  std::vector<int64_t> params;
  std::vector<at::Tensor> grads;
  for (const auto param : bucket.params()) {
    rules_.context.with_grad(param, [&](const at::Tensor& grad) {
      if (grad.defined()) {
        params.push_back(param);
        grads.push_back(grad);
      }
    });
  }
  rules_.non_finite.look_at(params, grads);
}

}  // namespace torchddp::reducer
