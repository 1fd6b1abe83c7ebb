#include "reducer/pack/hook_packer.h"

namespace torchddp::reducer {

void HookPacker::pack(int64_t param, at::Tensor& grad, bool unused, const at::Tensor* incoming) const {
  const auto& place = rules_.layout.place(param);
  auto& slot = *place.slot;
  if (place.bucket->is_given_away()) {
    pack_given_away(param, grad, unused, incoming);
    return;
  }
  if (!grad.defined()) [[unlikely]] {
    rules_.leave_to_holders(place);
    slot.zero();
    return;
  }
  if (rules_.packed.shows_own() && slot.holds(grad)) {
    rules_.leave_to_holders(place);
  }
  if (slot.holds(grad) || (rules_.may_adopt(*place.bucket, grad, unused, incoming) && slot.adopt(grad))) {
    look_in_place(param, place, grad);
    if (unused) {
      rules_.step.add_late(param, slot.clone());
    } else {
      rules_.packed.note(param, grad, /*in_place=*/true);
    }
    scale(place);
    return;
  }
  rules_.leave_to_holders(place);
  copy_into(param, slot, grad);
  rules_.copied(param, grad, unused);
}

// See Note [Gradients that are given away] in bucket/bucket.h.
void HookPacker::pack_given_away(int64_t param, at::Tensor& grad, bool unused, const at::Tensor* incoming) const {
  const auto& place = rules_.layout.place(param);
  auto& slot = *place.slot;
  const auto lend = [&] {
    if (!slot.has_memory()) {
      rules_.layout.lend_memory(*place.bucket);
    }
  };
  if (!grad.defined()) {
    lend();
    slot.zero();
    return;
  }
  if (unused) {
    rules_.step.add_late(param, grad);
  }
  if (!unused && !grad.requires_grad() && !slot.has_memory() && bucket::is_unshared(grad, incoming) &&
      slot.adopt(grad)) {
    rules_.non_finite.look_at(param, grad);
    scale(place);
  } else {
    lend();
    copy_into(param, slot, grad);
    warn_create_graph(grad);
  }
  if (rules_.context.rpc == nullptr) {
    grad.reset();
  }
}

void HookPacker::copy_into(int64_t param, bucket::GradSlot& slot, const at::Tensor& grad) const {
  int64_t non_finite = 0;
  if (!slot.try_pack(grad, rules_.step.scale(), rules_.non_finite.on() ? &non_finite : nullptr)) [[unlikely]] {
    rules_.check(param, grad);
    rules_.non_finite.look_at(param, grad);
    slot.pack(grad, rules_.step.scale());
  }
  rules_.non_finite.note(param, non_finite);
}

void HookPacker::scale(const BucketLayout::Place& place) const {
  if (place.bucket->scales_in_flight()) {
    place.bucket->leave_scale(rules_.step.scale());
  } else {
    place.slot->scale_in_place(rules_.step.scale());
  }
}

// For a gradient that is not copied, checking it here would cost an extra pass, so the reduction checks it if it can.
void HookPacker::look_in_place(int64_t param, const BucketLayout::Place& place, const at::Tensor& grad) const {
  if (rules_.non_finite.on() && !rules_.layout.reduction(place.index).counts_non_finite(*place.bucket)) {
    rules_.non_finite.look_at(param, grad);
  }
}

}  // namespace torchddp::reducer
