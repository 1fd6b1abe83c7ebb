#include "reducer/pack/packers.h"

#include <c10/core/GradMode.h>

#include "common/check.h"

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
  if (rules_.packed.shows_own() && slot.holds(grad)) rules_.leave_to_holders(place);
  if (slot.holds(grad) || (rules_.may_adopt(*place.bucket, grad, unused, incoming) && slot.adopt(grad))) {
    look_in_place(param, place, grad);
    if (unused) {
      rules_.step.add_late(param, grad.detach().clone());
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
    if (!slot.has_memory()) rules_.layout.lend_memory(*place.bucket);
  };
  if (!grad.defined()) {
    lend();
    slot.zero();
    return;
  }
  if (unused) rules_.step.add_late(param, grad);
  if (!unused && !grad.requires_grad() && !slot.has_memory() && bucket::is_unshared(grad, incoming) &&
      slot.adopt(grad)) {
    rules_.non_finite.look_at(param, grad);
    scale(place);
  } else {
    lend();
    copy_into(param, slot, grad);
    warn_create_graph(grad);
  }
  if (rules_.context.rpc == nullptr) grad.reset();
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

Packers::Packers(const Context& context, Step& step, BucketLayout& layout, NonFiniteWatch& non_finite,
                 PackedGrads& packed, const UsedParams& used)
    : whole_(context.packs_whole_buckets()), used_(used), rules_(context, step, layout, non_finite, packed),
      in_hook_(rules_), whole_bucket_(rules_) {}

void Packers::pack(int64_t param, bool unused, const at::Tensor* incoming) {
  const auto& place = rules_.layout.place(param);
  const auto& main_grads = rules_.context.main_grads;
  TDDP_INTERNAL(main_grads == nullptr || main_grads->slot(param) == place.slot, "the main gradient of parameter ",
                param, " is in another bucket than the one that is sent");
  if (place.slot == nullptr) [[unlikely]] {
    rules_.context.with_grad(param, [&](at::Tensor& grad) { pack_sparse(param, place, grad, unused); });
  } else if (whole_) {
    if (place.slot->is_in_place()) whole_bucket_.note_gradient(param, incoming);
  } else {
    rules_.context.with_grad(param, [&](at::Tensor& grad) { in_hook_.pack(param, grad, unused, incoming); });
  }
}

void Packers::pack_sparse(int64_t param, const BucketLayout::Place& place, at::Tensor& grad, bool unused) const {
  const c10::NoGradGuard no_grad;
  const auto& context = rules_.context;
  const auto& name = context.spec(param).name;
  const bool stays = !context.shares_gradients && !unused && grad.defined();
  if (context.shares_gradients) {
    rules_.step.add_late(param);  // gets a copy of the average
  } else if (!stays) {
    rules_.step.add_late(param, grad);
  }
  auto packed = grad.defined() ? grad : no_rows(context.params[param]);
  // Its values may be the memory of another gradient. The program may keep the tensor itself.
  if (grad.defined() && !sparse_metadata_) packed = stays ? grad.copy_(grad.detach()) : grad.clone();
  if (packed.layout() == at::kSparse) {
    TDDP_CHECK(!used_.are_known() || packed.sparse_dim() == 1, "parameter '", name, "' on rank ", context.rank(),
               ": its sparse gradient has sparse_dim ", packed.sparse_dim(),
               ", but if ranks may skip parameters it must be 1 (whole rows), as for embeddings");
    rules_.non_finite.look_at(param, packed._values());
  }
  auto sparse = make_sparse_grad(packed, rules_.step.scale(), name, sparse_metadata_);
  place.bucket->set_sparse_gradient(sparse.gradient, std::move(sparse.row_ids));
  if (!context.shares_gradients) grad = std::move(sparse.gradient);
}

}  // namespace torchddp::reducer
