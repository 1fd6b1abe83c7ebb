// Gradients into their buckets, one by one as their hooks fire. Whole buckets: reducer_device.cpp.
#include <ATen/Functions.h>

#include "common/check.h"
#include "reducer/reducer_inl.h"

namespace torchddp::reducer {

void Reducer::pack(int64_t param, bool unused, const at::Tensor* incoming) {
  const auto& place = places_[static_cast<size_t>(param)];
  if (place.slot == nullptr) {
    pack_sparse(param, unused);
  } else if (!packs_whole_buckets()) {
    with_grad(param, [&](at::Tensor& grad) { pack_grad(param, grad, unused, incoming); });
  } else {
    note_stream(*place.bucket);  // packed when the bucket is complete
  }
}

void Reducer::pack_grad(int64_t param, at::Tensor& grad, bool unused, const at::Tensor* incoming) {
  const auto& place = places_[static_cast<size_t>(param)];
  auto& slot = *place.slot;
  if (gives_away(*place.bucket)) {
    pack_given_away(param, grad, incoming);
    return;
  }
  if (!grad.defined()) [[unlikely]] {
    leave_to_holders(place);
    slot.zero();
    add_late(param);
    return;
  }
  if (slot.holds(grad)) {
    look_in_flight(param, grad);
    if (unused) {
      add_late(param, slot.clone());
    }
    scale_slot(place);
    return;
  }
  const bool replaced = becomes_view(grad, unused, incoming);
  if (replaced && (keeps_apart() || bucket::is_unshared(grad, incoming)) && slot.adopt(grad)) {
    look_in_flight(param, grad);
    scale_slot(place);
    return;
  }
  leave_to_holders(place);
  copy_into(param, slot, grad);
  if (!views_) {
    return;  // finish_bucket copies the average back
  }
  if (!replaced) [[unlikely]] {
    if (grad.requires_grad()) {
      warn_create_graph();
    }
    add_late(param);
    return;
  }
  slot.restore_view();
  grad = slot.view();
}

void Reducer::add_late(int64_t param, at::Tensor saved) {
  const std::lock_guard lock(late_mutex_);
  late_.push_back({param, std::move(saved)});
}

// Before a slot is overwritten: see Note [Gradients that the program keeps] in bucket/grad_slot.h.
void Reducer::leave_to_holders(const Place& place) {
  if (place.slot->leave_to_holders()) [[likely]] {
    return;
  }
  for (const auto param : place.bucket->move(*transport_)) {
    add_late(param);
  }
}

void Reducer::leave_to_holders(bucket::Bucket& bucket) {
  for (int64_t i = 0; i < bucket.num_slots(); ++i) {
    const auto param = bucket.params()[static_cast<size_t>(i)];
    with_grad(param, [&](const at::Tensor& grad) {
      if (!grad.defined() || !bucket.slot(i).holds(grad)) {
        leave_to_holders(places_[static_cast<size_t>(param)]);
      }
    });
  }
}

void Reducer::copy_into(int64_t param, bucket::GradSlot& slot, const at::Tensor& grad) {
  int64_t non_finite = 0;
  if (!slot.try_pack(grad, scale_, non_finite_ != nullptr ? &non_finite : nullptr)) [[unlikely]] {
    check_grad(param, grad);
    look_at(param, grad);
    slot.pack(grad, scale_);
  } else if (non_finite > 0) [[unlikely]] {
    non_finite_->note(stats_.steps, param, non_finite);
  }
}

void Reducer::warn_create_graph() {
  TORCH_WARN_ONCE(
      "backward(create_graph=True) under DistributedDataParallel averages the gradients, but not what is "
      "differentiated through them: higher-order gradients are not synchronized across ranks.");
}

// For a gradient that is in its slot already.
void Reducer::scale_slot(const Place& place) {
  if (place.bucket->scales_in_flight()) {
    place.bucket->scale = scale_;
  } else {
    place.slot->scale_in_place(scale_);
  }
}

void Reducer::check_grad(int64_t param, const at::Tensor& grad) const {
  const auto& slot = *places_[static_cast<size_t>(param)].slot;
  const auto& name = specs_[static_cast<size_t>(param)].name;
  const auto expected = mixed_precision_dtype_.value_or(slot.dtype());
  TDDP_CHECK(grad.scalar_type() == expected, "parameter '", name, "' on rank ", transport_->rank(),
             ": expected a gradient of dtype ", expected, ", got ", grad.scalar_type(),
             ". The model was changed after it was wrapped; wrap it again.");
  TDDP_CHECK(grad.layout() == at::kStrided, "parameter '", name, "' on rank ", transport_->rank(), ": got a ",
             grad.layout(), " gradient; sparse ones need a module with sparse=True when the model is wrapped.");
  TDDP_CHECK(grad.numel() == slot.numel() && grad.sizes() == slot.sizes(), "parameter '", name, "' on rank ",
             transport_->rank(), ": the gradient has shape ", grad.sizes(), ", its bucket slot ", slot.sizes(),
             ". The model was changed after it was wrapped; wrap it again.");
}

void Reducer::pack_sparse(int64_t param, bool unused) {
  const auto& place = places_[static_cast<size_t>(param)];
  auto& sparse = sparse_[static_cast<size_t>(place.bucket_index)];
  with_grad(param, [&](at::Tensor& grad) {
    c10::NoGradGuard no_grad;
    if (unused || !grad.defined()) {
      add_late(param, grad.defined() ? grad.clone() : grad);
    }
    if (!grad.defined()) {
      grad = no_rows(params_[static_cast<size_t>(param)]);
    }
    if (grad.layout() == at::kSparse) {
      TDDP_CHECK(used_map_ == nullptr || grad.sparse_dim() == 1, "parameter '", specs_[static_cast<size_t>(param)].name,
                 "' on rank ", transport_->rank(), ": its sparse gradient has sparse_dim ", grad.sparse_dim(),
                 ", and where ranks may leave a parameter out it must have rows (sparse_dim 1), as embeddings give it");
      look_at(param, grad._values());
    }
    grad = sparse.take(*place.bucket, grad, scale_, specs_[static_cast<size_t>(param)].name,
                       sparse_metadata_ ? &*sparse_metadata_ : nullptr);
  });
}

// Whether the slot's view takes the place of a gradient that is not in its slot yet; otherwise the average is copied back.
bool Reducer::becomes_view(const at::Tensor& grad, bool unused, const at::Tensor* incoming) const {
  return views_ && !unused && !grad.requires_grad() && rpc_context_ == nullptr &&
         (!keeps_apart() || bucket::is_unshared(grad, incoming));
}

}  // namespace torchddp::reducer
