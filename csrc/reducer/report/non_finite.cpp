#include "reducer/report/non_finite.h"

#include <ATen/Functions.h>
#include <ATen/ops/_foreach_norm.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "bucket/tensor_checks.h"
#include "common/errors.h"
#include "reducer/report/messages.h"

namespace torchddp::reducer {

NonFiniteWatch::NonFiniteWatch(const Context& context, const StepEvents& events)
    : context_(context), events_(events), on_(context.config.find_non_finite || context.config.raise_non_finite),
      seen_(on_ ? context.params.size() : 0, 0) {}

// See Note [Episodes].
void NonFiniteWatch::add(int64_t step, int64_t param, int64_t count) {
  if (step > last_step_ + 1) {
    episode_.clear();
    seen_.assign(seen_.size(), 0);
  }
  last_step_ = std::max(last_step_, step);
  if (auto& seen = seen_[param]; seen == 0) {
    seen = 1;
    episode_.push_back({step, param, count});
    ++version_;
  }
}

void NonFiniteWatch::look_at(const std::vector<int64_t>& params, const std::vector<at::Tensor>& grads) {
  const c10::NoGradGuard no_grad;
  Pending pending{events_.steps(), {}, {}, std::nullopt};
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].numel() > 0) {
      pending.params.push_back(params[i]);
      values.push_back(grads[i].is_complex() ? at::view_as_real(grads[i].resolve_conj()) : grads[i]);
    }
  }
  if (values.empty()) return;
  // The largest magnitude propagates NaNs, and needs few launches for many gradients.
  auto largest = at::_foreach_norm(values, std::numeric_limits<double>::infinity());
  for (auto& value : largest) value = value.to(largest.front().scalar_type());
  const auto finite = at::stack(largest).isfinite();
  const auto device = finite.device();
  if (device.is_cpu()) {
    pending.finite = finite;
  } else {
    pending.finite = at::empty(finite.sizes(), finite.options().device(at::kCPU).pinned_memory(device.is_cuda()));
    pending.finite.copy_(finite, /*non_blocking=*/true);
    pending.known.emplace(device.type());
    pending.known->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  const std::lock_guard lock(mutex_);
  pending_.push_back(std::move(pending));
}

void NonFiniteWatch::collect(bool wait) {
  while (!pending_.empty()) {
    const auto& first = pending_.front();
    if (first.known && wait) first.known->synchronize();
    if (first.known && !first.known->query()) return;
    const auto* const finite = first.finite.const_data_ptr<bool>();
    for (size_t i = 0; i < first.params.size(); ++i) {
      if (!finite[i]) add(first.step, first.params[i], kUncounted);
    }
    pending_.pop_front();
    published_ = version_;
  }
}

void NonFiniteWatch::look_at(int64_t param, const at::Tensor& grad) {
  if (on()) note(param, bucket::count_non_finite(grad));
}

void NonFiniteWatch::look_at_average(const bucket::Bucket& bucket, bool known_finite) {
  if (!context_.config.raise_non_finite || known_finite) [[likely]] {
    return;
  }
  const auto& average = bucket.is_sparse() ? bucket.buffer()._values() : bucket.wire();
  const auto is_bad = [](const at::Tensor& values) { return bucket::count_non_finite(values) > 0; };
  if (!is_bad(average) && std::ranges::none_of(bucket.in_place(), is_bad)) [[likely]] {
    return;
  }
  for (int64_t i = 0; i < bucket.num_slots(); ++i) {
    if (bucket.is_sparse() || is_bad(bucket.values(i))) bad_averages_.push_back(bucket.params()[i]);
  }
}

void NonFiniteWatch::raise_if_bad() {
  if (bad_averages_.empty()) return;
  const auto bad = std::exchange(bad_averages_, {});
  std::vector<int64_t> own;
  for (const auto& found : episode()) {
    if (found.step == events_.steps()) own.push_back(found.param);
  }
  throw NonFiniteError(non_finite_message(context_, events_.steps(), bad, own));
}

}  // namespace torchddp::reducer
