#include "reducer/reduce/layout.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace torchddp::reducer {

// By parameter: whether its gradient lives in its bucket. If not, averages are copied back to the program's tensor.
std::vector<bool> BucketLayout::find_views() const {
  std::vector<bool> is_view(context_.params.size(), false);
  for (int64_t i = 0; i < std::ssize(places_); ++i) {
    const auto& grad = context_.kept_grad(i);
    auto* const slot = places_[i].slot;
    is_view[i] = slot != nullptr && grad.defined() && slot->holds(grad);
    if (is_view[i] && context_.has_own_storage() && !retired_) {
      slot->release_memory();
      is_view[i] = bucket::is_unshared(grad, nullptr);
    }
  }
  return is_view;
}

void BucketLayout::lay_out(plan::BucketPlan plan) {
  const auto is_view = find_views();
  const std::lock_guard lock(layout_mutex_);
  retired_ = true;  // until this succeeds: a broken transport, or a lack of memory, throws halfway
  if (context_.main_grads != nullptr) context_.main_grads->leave_slots();
  // The old memory is released bucket by bucket, as soon as its last gradient has moved.
  in_place_bytes_ = reductions_.in_place_bytes();
  places_.assign(context_.params.size(), Place{});
  of_buckets_.clear();
  buckets_.clear();
  const c10::NoGradGuard no_grad;
  plan_ = std::move(plan);  // the next step lays it out, as the other ranks have, if this fails
  for (const auto& spec : plan_.buckets) add_bucket(spec, is_view);
  choose_reductions();
  retired_ = false;
  expect_gradients();
  if (context_.config.gradient_stats) {
    gradient_stats_ = at::zeros({size(), 2}, at::TensorOptions().dtype(at::kDouble).device(context_.param_device()));
  }
}

void BucketLayout::add_bucket(const plan::BucketSpec& spec, const std::vector<bool>& is_view) {
  const auto index = size();
  const auto storage = context_.grad_storage(spec.slots.front().param);
  const bool may_lie_in_place =
      in_place_bytes_ > 0 && !spec.sparse && storage.may_adopt && at::isFloatingType(storage.dtype);
  buckets_.push_back(std::make_unique<bucket::Bucket>(
      may_lie_in_place ? plan::lay_in_place(spec, context_.specs, in_place_bytes_) : spec, context_.params,
      *context_.transport, storage));
  auto& bucket = *buckets_.back();
  for (int64_t i = 0; i < bucket.num_slots(); ++i) {
    const auto param = bucket.params()[i];
    auto* slot = bucket.is_sparse() ? nullptr : &bucket.slot(i);
    places_[param] = Place{slot, &bucket, index};
    marks_.across(param, [&] { move_grad(param, slot, is_view[param]); });
  }
}

void BucketLayout::move_grad(int64_t param, bucket::GradSlot* slot, bool is_view) const {
  if (context_.main_grads != nullptr) {
    context_.main_grads->move_to(*slot, param);
    return;
  }
  if (!is_view || slot == nullptr) return;
  auto& grad = context_.kept_grad(param);
  if (slot->is_in_place()) {
    grad = grad.clone(at::MemoryFormat::Preserve);
    return;
  }
  slot->pack(grad, 1.0);
  grad = slot->view();
}

void BucketLayout::give_up_views() const {
  const c10::NoGradGuard no_grad;
  for (int64_t i = 0; i < std::ssize(places_); ++i) {
    auto& grad = context_.kept_grad(i);
    const auto* const slot = places_[i].slot;
    if (slot != nullptr && grad.defined() && slot->holds(grad)) {
      marks_.across(i, [&] { grad = slot->clone(); });
    }
  }
}

// Gradients with a bucket of their own may be allocated directly in it.
void BucketLayout::expect_gradients() const {
  std::vector<int64_t> sizes;
  for (const auto& bucket : buckets_) {
    if (gives_views(*bucket) && bucket->grad_storage().may_adopt && !bucket->is_sparse() && bucket->num_slots() == 1) {
      sizes.push_back(bucket->bytes());
    }
  }
  context_.transport->expect_gradients(sizes);
}

void BucketLayout::begin_step() {
  if (retired_) lay_out_again();
  for (const auto& bucket : buckets_) {
    if (bucket->is_displaced()) [[unlikely]] {
      bucket->move(*context_.transport);
    }
    bucket->begin_step();
  }
}

void BucketLayout::describe(Status& status, const Step& step) const {
  status.armed = step.is_under_way();
  const std::unique_lock lock(layout_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  for (const auto& bucket : buckets_) {
    auto& entry = status.buckets.emplace_back(BucketStatus{bucket->state(), {}});
    if (!status.armed) continue;
    for (const auto param : bucket->params()) {
      if (step.mark_of(param) == Mark::kNone) entry.missing.push_back(param);
    }
  }
}

}  // namespace torchddp::reducer
