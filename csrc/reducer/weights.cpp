#include "reducer/weights.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "common/check.h"
#include "reducer/report/failure.h"

namespace torchddp::reducer {

void Weights::announce(double weight, double count, bool goes_on) {
  TDDP_CHECK(
      !has_unweighted_.exchange(false) || !has_values(), "rank ", context_.rank(),
      ": weigh() was called, but there are gradients of an earlier backward whose weight is unknown. Call weigh(n) "
      "before each backward of a step, or clear the gradients first.");
  if (open_ && phase_.load(std::memory_order_relaxed) == Phase::kCame && !has_gradients()) {
    own_ = unit_ = 0.0;  // the program has dropped the accumulated gradients
  }
  if (!open_) {
    own_ = unit_ = goes_on ? reduced_ : 0.0;
    open_ = true;
  }
  if (weight > 0.0) {
    if (unit_ != weight && unit_ > 0.0) {
      rescale(unit_ / weight);
    }
    unit_ = weight;
  }
  drops_ = weight == 0.0;
  count_ = count;
  first_param_ = -1;
  phase_.store(Phase::kAnnounced, std::memory_order_release);
}

// A backward that does not reduce may belong to the bare module, whose gradients are cleared before the next step.
void Weights::check_unannounced(int64_t param, bool reduces) {
  if (!context_.config.weighted && !open_) [[likely]] {
    return;
  }
  TDDP_CHECK(!reduces && !open_, "rank ", context_.rank(), ": a backward has begun (parameter '",
             context_.spec(param).name,
             "') whose weight is unknown, and this model's gradients are weighted. Call weigh(n) before each "
             "backward, with its number of samples or tokens.");
}

void Weights::came(bool reduces) {
  if (!reduces && !open_) {
    has_unweighted_.store(true, std::memory_order_relaxed);
  }
}

void Weights::coming(int64_t param, bool reduces, bool may_repeat, at::Tensor& incoming) {
  const auto phase = phase_.load(std::memory_order_acquire);
  if (phase == Phase::kNone) [[likely]] {
    check_unannounced(param, reduces);
    return;
  }
  if (phase == Phase::kAnnounced) {
    const std::lock_guard lock(mutex_);
    if (phase_.load(std::memory_order_relaxed) == Phase::kAnnounced) {
      own_ += count_;
      first_param_ = param;
      phase_.store(Phase::kCame, std::memory_order_release);
    }
  } else {
    TDDP_CHECK(param != first_param_ || may_repeat, "rank ", context_.rank(), ": parameter '",
               context_.spec(param).name,
               "' got a second gradient after one weigh(). Call weigh(n) before each backward; for several "
               "losses of the same samples, add them up and call backward() once.");
  }
  if (drops_ && incoming.defined()) [[unlikely]] {
    incoming = at::zeros_like(incoming);
  }
}

bool Weights::has_gradients() const {
  bool found = false;
  for (int64_t param = 0; param < context_.num_params() && !found; ++param) {
    context_.with_grad(param, [&](const at::Tensor& grad) { found = grad.defined(); });
  }
  return found;
}

// Gradients may have been cleared to zeros.
bool Weights::has_values() const {
  bool found = false;
  for (int64_t param = 0; param < context_.num_params() && !found; ++param) {
    context_.with_grad(param, [&](const at::Tensor& grad) {
      found = grad.defined() && (grad.layout() == at::kStrided ? grad : grad._values()).any().item<bool>();
    });
  }
  return found;
}

void Weights::rescale(double factor) const {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  for (int64_t param = 0; param < context_.num_params(); ++param) {
    context_.with_grad(param, [&](at::Tensor& grad) {
      if (!grad.defined()) {
        return;
      }
      if (grad.layout() == at::kStrided) {
        grads.push_back(grad);
      } else {
        grad.mul_(factor);
      }
    });
  }
  if (!grads.empty()) {
    at::_foreach_mul_(grads, factor);
  }
}

double Weights::begin() {
  if (!open_) {
    return divisor_.scale();
  }
  TDDP_CHECK(!context_.is_captured(), "rank ", context_.rank(),
             ": weighted gradients can't be captured in a CUDA graph, because every replay would use the same weight");
  share(own_);
  return reference_ ? unit_ / *reference_ * divisor_.of_hooks() : 0.0;
}

void Weights::share(double count) {
  if (!reference_ || divisor_.changes()) {
    reference_.reset();
    follow(agreed_total(count));
  } else {
    start_exchange(count);
  }
}

void Weights::follow(double total) {
  constexpr double kFar = 16.0;
  if (total > 0.0 && (!reference_ || total > *reference_ * kFar || total < *reference_ / kFar)) {
    reference_ = total;
  }
}

void Weights::start_exchange(double count) {
  total_ = at::full({1}, count, at::TensorOptions().dtype(at::kDouble).device(context_.param_device()));
  work_ = context_.transport->make_work();
  context_.transport->start(transport::Collective::all_reduce(total_), *work_);
}

void Weights::wait_for_total() {
  const auto work = std::exchange(work_, nullptr);
  if (work == nullptr) {
    return;
  }
  const WaitScope waits(events_.live(), "the weights of the other ranks");
  described_in_step(context_, events_, "adding up the weights of all ranks",
                    [&] { work->wait(context_.config.timeout); });
}

double Weights::agreed_total(double count) {
  const c10::NoGradGuard no_grad;
  start_exchange(count);
  wait_for_total();
  return total_.item<double>();
}

void Weights::correct(bucket::Bucket& bucket) {
  if (work_ != nullptr) {
    wait_for_total();
    if (!total_.is_cpu() || (total_.item<double>() != *reference_ && total_.item<double>() > 0.0)) {
      factor_ = at::where(total_ > 0.0, *reference_ / total_, 1.0).squeeze();
    }
  }
  if (!factor_.defined() || bucket.is_given_away()) {
    return;
  }
  if (bucket.is_sparse()) {
    bucket.buffer()._values().mul_(factor_);
    return;
  }
  bucket.wire().mul_(factor_);
  for (auto gradient : bucket.apart()) {
    gradient.mul_(factor_);
  }
}

void Weights::finish() {
  has_unweighted_.store(false, std::memory_order_relaxed);
  if (!std::exchange(open_, false)) {
    return;
  }
  wait_for_total();
  if (total_.is_cpu()) {  // a device's would have to be waited for
    follow(total_.item<double>());
  }
  phase_.store(Phase::kNone, std::memory_order_relaxed);
  reduced_ = own_;
  factor_.reset();
}

void Weights::raise_if_zero() {
  const auto total = std::exchange(total_, at::Tensor());
  if (!total.defined() || !context_.config.zero_weights_raise || total.item<double>() > 0.0) {
    return;
  }
  throw ZeroWeightError(c10::str("rank ", context_.rank(), ", step ", events_.steps(),
                                 ": no rank gave this step a weight above 0, so there is no weighted mean; the "
                                 "gradients are zeros. Skip such steps on "
                                 "all ranks, or make the model with zero_weights=\"zeros\"."));
}

void Weights::abandon() {
  if (work_ != nullptr) {
    work_->abandon();
    work_.reset();
  }
  phase_.store(Phase::kNone, std::memory_order_relaxed);
  open_ = false;
  reduced_ = 0.0;
  factor_.reset();
  total_.reset();
  forget_total();
}

void Weights::take_over(const Weights& before) {
  phase_.store(before.phase_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  count_ = before.count_;
  drops_ = before.drops_;
  has_unweighted_.store(before.has_unweighted_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  open_ = before.open_;
  own_ = before.own_;
  unit_ = before.unit_;
  reduced_ = before.reduced_;
  reference_ = before.reference_;
}

void Weights::match() {
  if (context_.config.weighted) {
    share(0.0);
  }
}

void Weights::finish_match() {
  wait_for_total();
  if (total_.defined() && total_.is_cpu()) {
    follow(total_.item<double>());
  }
  raise_if_zero();
}

}  // namespace torchddp::reducer
