// Which buckets there are: laid out anew by a measured order or a plan that ranks agree on, over another transport.
#include <ATen/Functions.h>

#include "common/check.h"
#include "reducer/plan_agreement.h"
#include "reducer/reducer.h"

namespace torchddp::reducer {

void Reducer::apply_plan(plan::BucketPlan plan) {
  plan::check_plan(plan, specs_, config_.limits.alignment_bytes);
  // Gradients that live in old buckets move along; the old memory goes bucket by bucket, as soon as its last gradient has moved. One
  // that the program holds stays: averages are copied back to it.
  std::vector<bool> is_view(params_.size(), false);
  for (size_t i = 0; i < places_.size(); ++i) {
    const auto& grad = params_[i].grad();
    auto* const slot = places_[i].slot;
    is_view[i] = slot != nullptr && grad.defined() && slot->holds(grad);
    if (is_view[i] && keeps_apart() && !needs_fresh_memory_) {
      slot->let_go();
      is_view[i] = bucket::is_unshared(grad, nullptr);
    }
  }
  const std::lock_guard lock(layout_mutex_);
  needs_fresh_memory_ = true;  // until this is through: a transport that is broken throws in the middle
  places_.assign(params_.size(), Place{});
  buckets_.clear();
  lent_.clear();
  sparse_.assign(plan.buckets.size(), SparseGrad{});
  const c10::NoGradGuard no_grad;
  for (const auto& spec : plan.buckets) {
    const auto index = static_cast<int64_t>(buckets_.size());
    buckets_.push_back(std::make_unique<bucket::Bucket>(spec, params_, *transport_, config_.view_storage));
    auto& bucket = *buckets_.back();
    for (int64_t i = 0; i < bucket.num_slots(); ++i) {
      const auto param = static_cast<size_t>(bucket.params()[static_cast<size_t>(i)]);
      auto* slot = bucket.is_sparse() ? nullptr : &bucket.slot(i);
      places_[param] = Place{slot, &bucket, index};
      if (is_view[param] && slot != nullptr) {
        auto& grad = params_[param].mutable_grad();
        slot->pack(grad, 1.0);
        grad = slot->view();
      }
    }
  }
  plan_ = std::move(plan);
  ++num_layouts_;
  needs_fresh_memory_ = false;
  expect_gradients();
  if (config_.gradient_stats) {
    gradient_stats_ = at::zeros({static_cast<int64_t>(buckets_.size()), 2},
                                at::TensorOptions().dtype(at::kDouble).device(params_.front().device()));
  }
}

// Gradients that have a bucket each may be born in it.
void Reducer::expect_gradients() {
  std::vector<int64_t> sizes;
  for (const auto& bucket : buckets_) {
    if (views_ && !bucket->is_sparse() && bucket->num_slots() == 1) {
      sizes.push_back(bucket->bytes());
    }
  }
  transport_->expect_gradients(sizes);
}

bool Reducer::rebuild_buckets() {
  if (is_unfinished()) {
    raise_unfinished();
  }
  note_capture();
  if (!should_rebuild() || measured_order_.empty()) {
    return false;
  }
  // If that fails there is no second attempt: the next order is that of another step.
  const auto order = std::exchange(measured_order_, {});
  switch_to(plan::make_bucket_plan(specs_, order, config_.limits));
  return true;  // also if the order makes the same buckets
}

bool Reducer::adopt_plan(const std::optional<plan::BucketPlan>& wanted) {
  if (is_unfinished()) {
    raise_unfinished();
  }
  note_capture();
  TDDP_CHECK(!is_in_graph_, "buckets on rank ", transport_->rank(),
             " can't change: a captured CUDA graph holds their addresses. Plan before the capture.");
  if (wanted) {
    plan::check_plan(*wanted, specs_, config_.limits.alignment_bytes);
  }
  const bool differs = switch_to(wanted.value_or(plan_));
  if (!differs) {
    agree_on_memory();  // for a rank that has joined with other buckets did
  }
  return differs;
}

bool Reducer::switch_to(const plan::BucketPlan& mine) {
  plan::BucketPlan agreed;
  const WaitScope waits(*live_, "the other ranks, to agree on new buckets");
  try {
    agreed = agree_on_plan(mine, specs_, config_.limits, *transport_, params_.front().device(), config_.timeout);
  } catch (const TransportError& error) {
    throw TransportError(
        live_->with_note(c10::str("rank ", transport_->rank(), ": agreeing on new buckets before step ", stats_.steps,
                                  " failed: ", error.what())));
  }
  const bool differs = agreed != plan_;
  if (differs) {
    apply_plan(std::move(agreed));
    agree_on_memory();
  }
  has_rebuilt_ = true;
  measured_order_.clear();
  return differs;
}

// Collective if the transport may lose memory.
void Reducer::agree_on_memory() {
  auto agreed = transport::agree_on_memory(transport_, config_.timeout);
  if (agreed != transport_) {
    use_transport(std::move(agreed));
  }
}

void Reducer::use_transport(std::shared_ptr<transport::Transport> transport) {
  // Works of the old one, which buckets hold, must not outlive it.
  const auto old = std::exchange(transport_, std::move(transport));
  if (used_map_ != nullptr) {
    used_map_->rebind(*transport_);
  }
  apply_plan(plan_);
}

void Reducer::push_rebuilt_params_for_all_indices() {
  if (should_rebuild() && measured_order_.empty()) {
    measured_order_ = plan::reverse_registration_order(static_cast<int64_t>(params_.size()));
  }
}

}  // namespace torchddp::reducer
