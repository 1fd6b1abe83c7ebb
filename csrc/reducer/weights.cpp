#include "reducer/weights.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "common/check.h"
#include "reducer/report/messages.h"
#include "transport/c10d/group_work.h"
#include "transport/scaling.h"

namespace torchddp::reducer {

int64_t Divisor::get() const {
  const auto divisor = ranks();
  if (forward_work_ == nullptr || use_static_world_size_) return divisor;
  const WaitScope waits(events_.live(), "how many ranks still have inputs (join)");
  described_in_step(context_, events_, "counting the ranks that still have inputs (join)", [&] {
    transport::wait_or_throw(*forward_work_, context_.group, context_.transport->interruption(),
                             transport::is_gloo(*context_.group));
  });
  const auto results = forward_work_->result();
  TDDP_INTERNAL(!results.empty(), "the all-reduce of join() has no result");
  return results.front().item<int64_t>();
}

namespace {

// Gradients may have been cleared to zeros.
bool is_any(const at::Tensor& grad) {
  return (grad.layout() == at::kStrided ? grad : grad._values()).any().item<bool>();
}

}  // namespace

void Weights::announce(double weight, double count, bool begins, bool ends) {
  const auto has_values = [](int64_t, const at::Tensor& grad) { return grad.defined() && is_any(grad); };
  TDDP_CHECK(
      !has_unweighted_.load() || !context_.any_grad(has_values), "rank ", context_.rank(),
      ": weigh() was called, but there are gradients of an earlier backward whose weight is unknown. Call weigh(n) "
      "before each backward of a step, or clear the gradients first.");
  has_unweighted_.store(false);
  const auto is_accumulated = [&](int64_t param, const at::Tensor& grad) {
    return parts_[param].is_known() && marks_.has(param, grad);
  };
  if (open_ && (begins || phase_ == Phase::kCame) && !context_.any_grad(is_accumulated)) {
    open_ = false;  // the program has dropped the accumulated gradients
    begins = true;
  }
  if (!std::exchange(open_, true)) {
    own_ = unit_ = begins ? 0.0 : reduced_;
    if (begins) {
      parts_.assign(parts_.size(), {});
    } else {
      resume();
    }
  }
  if (weight > 0.0) unit_ = weight;
  ends_ = ends;
  drops_ = weight == 0.0;
  count_ = count;
  first_param_ = -1;
  phase_.store(Phase::kAnnounced, std::memory_order_release);
}

// A backward that does not reduce may belong to the bare module, whose gradients are cleared before the next step.
void Weights::check_unannounced(int64_t param) {
  if (!context_.config.weighted && !open_) return;
  TDDP_CHECK(!step_.armed() && !open_, "rank ", context_.rank(),
             ": this model's gradients are weighted: call weigh(n) ",
             "before each backward, with its number of samples or tokens. A backward has begun (parameter '",
             context_.spec(param).name, "') whose weight is unknown.");
}

void Weights::after_accumulation(int64_t param) {
  if (open_) {
    context_.with_grad(param, [&](const at::Tensor& grad) {
      if (grad.defined()) marks_.note(param, grad);
    });
  } else if (!step_.armed()) {
    has_unweighted_.store(true, std::memory_order_relaxed);
  }
}

void Weights::before_accumulation(int64_t param, bool may_repeat, at::Tensor& incoming) {
  const auto phase = phase_.load(std::memory_order_acquire);
  if (phase == Phase::kNone) [[likely]] {
    check_unannounced(param);
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
  settle(param, /*unused=*/false);
  if (drops_ && incoming.defined()) [[unlikely]] {
    incoming = at::zeros_like(incoming);
  }
}

void Weights::resume() {
  for (int64_t param = 0; param < context_.num_params(); ++param) {
    auto& part = parts_[param];
    context_.with_grad(param, [&](const at::Tensor& grad) {
      if (!grad.defined()) {
        part = {};
        return;
      }
      part = {.begun = true, .unit = reduced_, .counted = reduced_, .start = std::move(part.start)};
      marks_.note(param, grad);
    });
  }
}

void Weights::settle(int64_t param, bool unused) {
  const c10::NoGradGuard no_grad;
  auto& part = parts_[param];
  context_.with_grad(param, [&](at::Tensor& grad) {
    look_for_changes(param, part, grad);
    if (!part.begun && !(step_.armed() && ends_)) {
      part.start = grad.defined() && !(grad.is_cpu() && !is_any(grad)) ? grad.clone() : at::Tensor();
    }
    if (unit_ == 0.0) return;  // nothing of this rank counts yet
    if (grad.defined()) {
      if (unused) step_.add_late(param, grad.clone());
      convert(part, grad);
    }
    part.begun = true;
    part.unit = unit_;
  });
}

void Weights::look_for_changes(int64_t param, Part& part, const at::Tensor& grad) const {
  if (!grad.defined() || (part.is_known() && !marks_.has(param, grad))) {
    part = {};  // the program has cleared or replaced it
  } else if (part.start.defined() && !marks_.is_intact(param, grad)) {
    TDDP_CHECK(
        !is_any(grad), "rank ", context_.rank(), ": the gradient of '", context_.spec(param).name,
        "' was changed between two backwards of a weighted step that began with a gradient, so the weights of its "
        "parts are unknown. Change it before the step or after it, or clear it before.");
    part.start.reset();
  }
}

void Weights::convert(Part& part, at::Tensor& grad) const {
  const bool reduces = step_.armed();
  if (!part.begun) part.unit = part.counted = reduces ? own_ : unit_;
  if (part.unit != unit_) transport::scale_by(grad, part.unit / unit_);
  if (reduces && part.start.defined() && part.counted != own_) {
    grad.add_(part.start, (own_ - part.counted) / unit_);
    part.counted = own_;
  }
}

double Weights::begin() {
  if (!open_) return divisor_.scale();
  TDDP_CHECK(!context_.is_captured(), "rank ", context_.rank(),
             ": weighted gradients can't be captured in a CUDA graph, because every replay would use the same weight");
  share(own_);
  return reference_ ? unit_ / *reference_ * divisor_.of_hooks() : 0.0;
}

void Weights::share(double count) {
  total_ = at::full({1}, count, at::TensorOptions().dtype(at::kDouble).device(context_.param_device()));
  work_ = context_.transport->make_work();
  context_.transport->start(transport::Collective::all_reduce(total_), *work_);
  if (!reference_ || divisor_.changes()) {
    reference_.reset();
    wait_for_total();
    follow(total_.item<double>());
  }
}

void Weights::wait_for_total() {
  const auto work = std::exchange(work_, nullptr);
  if (work == nullptr) return;
  const WaitScope waits(events_.live(), "the weights of the other ranks");
  described_in_step(context_, events_, "adding up the weights of all ranks",
                    [&] { work->wait(context_.config.timeout); });
}

void Weights::correct(bucket::Bucket& bucket) {
  if (work_ != nullptr) {
    wait_for_total();
    if (!total_.is_cpu() || (total_.item<double>() != *reference_ && total_.item<double>() > 0.0)) {
      factor_ = at::where(total_ > 0.0, *reference_ / total_, 1.0).squeeze();
      if (streams_ != nullptr) streams_->begin_packing();  // of nothing: notes the stream for follow()
    }
  }
  if (!factor_.defined() || bucket.is_given_away()) return;
  if (streams_ != nullptr) streams_->follow();
  if (bucket.is_sparse()) {
    transport::scale_by(bucket.buffer()._values(), factor_);
    return;
  }
  transport::scale_by(bucket.wire(), factor_);
  for (auto gradient : bucket.in_place()) transport::scale_by(gradient, factor_);
}

void Weights::finish() {
  has_unweighted_.store(false, std::memory_order_relaxed);
  if (!std::exchange(open_, false)) return;
  wait_for_total();
  if (total_.is_cpu()) {  // a device's would have to be waited for
    follow(total_.item<double>());
  }
  phase_.store(Phase::kNone, std::memory_order_relaxed);
  reduced_ = own_;
  if (ends_) parts_.assign(parts_.size(), {});
  factor_.reset();
}

void Weights::raise_if_zero() {
  const auto total = std::exchange(total_, at::Tensor());
  if (!total.defined() || !ends_ || !context_.config.zero_weights_raise || total.item<double>() != 0.0) return;
  throw ZeroWeightError(c10::str("rank ", context_.rank(), ", step ", events_.steps(),
                                 ": no rank gave this step a weight above 0, so there is no weighted mean; the "
                                 "gradients are zeros. Skip such steps on "
                                 "all ranks, or make the model with Checks(zero_weights=\"zeros\")."));
}

void Weights::take_over(const Weights& before, std::span<const int64_t> places) {
  phase_.store(before.phase_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  count_ = before.count_;
  drops_ = before.drops_;
  has_unweighted_.store(before.has_unweighted_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  open_ = before.open_;
  own_ = before.own_;
  unit_ = before.unit_;
  ends_ = before.ends_;
  for (size_t i = 0; i < parts_.size(); ++i) {
    parts_[i] = places[i] == kNotThere ? Part{} : before.parts_[places[i]];
  }
  reduced_ = before.reduced_;
  reference_ = before.reference_;
}

}  // namespace torchddp::reducer
