// What gradients are divided by: a number of ranks, or a sum of weights.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "bucket/bucket.h"
#include "gpu/bucket_streams.h"
#include "reducer/base/context.h"
#include "reducer/base/grad_marks.h"
#include "reducer/base/step.h"
#include "reducer/reduce/comm_hook.h"
#include "reducer/report/events.h"

namespace torchddp::reducer {

// The number of ranks that gradients are averaged over.
class Divisor {
 public:
  Divisor(const Context& context, const CommHook& hook, const StepEvents& events)
      : context_(context), hook_(hook), events_(events) {}

  // `divisor` is called once in each backward that reduces, for groups whose size changes between steps.
  void set(std::function<int64_t()> divisor) { divisor_ = std::move(divisor); }
  // Under join(): the all-reduce that counts the ranks with inputs, unless the divisor is always the world size.
  void set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool use_static_world_size) {
    forward_work_ = std::move(work);
    use_static_world_size_ = use_static_world_size;
  }
  // After a step that ended or failed.
  void forget_forward_work() { forward_work_.reset(); }

  // Whether the number of ranks may differ from step to step.
  bool changes() const { return divisor_ != nullptr; }
  // What a communication hook divides by; 1 if there is none.
  double of_hooks() const { return hook_ ? static_cast<double>(ranks()) : 1.0; }
  // The factor applied while a step's gradients are packed. A communication hook divides by itself.
  double scale() const {
    const auto divisor = static_cast<double>(get());
    return hook_ ? 1.0 : 1.0 / divisor;
  }

 private:
  int64_t ranks() const {
    const int64_t ranks = divisor_ ? divisor_() : context_.transport->size();
    TDDP_CHECK(ranks > 0, "gradients can't be averaged over ", ranks, " ranks");
    return ranks;
  }
  int64_t get() const;

  const Context& context_;
  const CommHook& hook_;
  const StepEvents& events_;
  std::function<int64_t()> divisor_;
  c10::intrusive_ptr<c10d::Work> forward_work_;
  bool use_static_world_size_ = false;
};

// Note [Weighted means]
// With weights w (samples, tokens), gradients become sum(w g) / sum(w) over the ranks and backwards of a step; without weights
// they become sum(g) / world_size.
//   Packing multiplies gradients by w / R, where R is the total weight of the first weighted step or, on a CPU, of the last one
//   whose total was far from R. What is sent is then about as large as an average, which 16-bit wires can hold; and if all
//   weights are equal, the result is the plain average to the bit.
//   This rank's share of the total is summed beside the first bucket. Each bucket's sum is then multiplied by R / total, which
//   costs one pass over it unless the total is R.
//   Between the backwards of a step, .grad holds sum(w g) / unit, where unit is the weight of the last backward that used the
//   parameter. The next one adds to it as usual, and .grad is rescaled only when the weight changes.
//   A gradient that is there when the step's first gradient comes counts as part of each loss: with this rank's share of the
//   total. It is multiplied once all weights are known. If several backwards are added to it, a copy of it is kept until then.
//   What the program changes between the backwards of a step is what has been added up so far, and keeps that weight.
//   A backward of weight 0 contributes nothing even if its gradients are NaN, as those of a mean over no samples are.
//
// Autograd threads call before_accumulation(); everything else is called by one thread at a time.
class Weights {
 public:
  Weights(const Context& context, const Divisor& divisor, const StepEvents& events, Step& step, GradMarks& marks)
      : context_(context), divisor_(divisor), events_(events), step_(step), marks_(marks),
        parts_(context.params.size()),
        streams_(context.devices.empty() ? nullptr : std::make_unique<gpu::BucketStreams>(context.devices.front())) {}

  // For the next backward: its gradients are multiplied by `weight`, and `count` is added to the divisor. If a step is reduced
  // several times, `begins` and `ends` tell whether the backward belongs to its first and its last reduction.
  void announce(double weight, double count, bool begins, bool ends);
  // Autograd is about to add `incoming` to a parameter's gradient. `may_repeat`: one backward may give a parameter several
  // gradients.
  void before_accumulation(int64_t param, bool may_repeat, at::Tensor& incoming);
  // It has been added. Also called if the model does not listen.
  void after_accumulation(int64_t param);
  // A parameter without a gradient of this backward is about to be packed. `unused`: no backward of the step has used it.
  void prepare(int64_t param, bool unused) {
    if (open_) settle(param, unused);
  }

  // A reduction begins. Returns the factor that packing applies.
  double begin();
  // Turns the sum in a bucket into a mean.
  void correct(bucket::Bucket& bucket);
  // The reduction has ended.
  void finish();
  // Throws ZeroWeightError if every rank's weight was 0 in the last step, unless that is allowed.
  void raise_if_zero();
  // The reduction has failed.
  void abandon() {
    if (work_ != nullptr) {
      work_->abandon();
      work_.reset();
    }
    if (open_) has_unweighted_.store(true, std::memory_order_relaxed);  // what .grad holds has lost its weight
    phase_.store(Phase::kNone, std::memory_order_relaxed);
    open_ = false;
    reduced_ = 0.0;
    factor_.reset();
    total_.reset();
    forget_total();
  }
  // Another reducer continues with the same model, between steps.
  void take_over(const Weights& before, std::span<const int64_t> places);
  // Whether before_accumulation() must be called.
  bool listens() const { return open_ || context_.config.weighted; }
  // Whether there are weighted gradients that are not reduced yet.
  bool is_open() const { return open_; }
  // Called before ranks join or leave.
  void forget_total() { reference_.reset(); }
  // Under join(), a rank without inputs takes part with weight 0 if the model's steps are weighted: begin(), then finish() and
  // raise_if_zero() of the others.
  void match() {
    if (context_.config.weighted) share(0.0);
  }
  void finish_match() {
    wait_for_total();
    if (total_.defined() && total_.is_cpu()) follow(total_.item<double>());
    raise_if_zero();
  }

 private:
  void check_unannounced(int64_t param);

  // State of the most recently announced backward.
  enum class Phase : uint8_t { kNone, kAnnounced, kCame };

  // What a parameter's .grad holds in an open step, multiplied by `unit`: the weighted gradients, and `counted` times what the
  // step began with.
  struct Part {
    bool is_known() const { return begun || start.defined(); }

    bool begun = false;  // otherwise nothing counts yet, and .grad is what the step began with
    double unit = 0.0;
    double counted = 0.0;
    at::Tensor start;  // undefined if there was nothing, or it need not be counted again
  };

  // The step goes on after a reduction, whose averages stand for all that they are means of.
  void resume();
  // Expresses a gradient in the current unit. In a backward that reduces, what the step began with gets all of its weight.
  void settle(int64_t param, bool unused);
  void look_for_changes(int64_t param, Part& part, const at::Tensor& grad) const;
  void convert(Part& part, at::Tensor& grad) const;
  // Tells the others this rank's share of the total, and waits for theirs if there is no R yet.
  void share(double count);
  // Lets R follow the total, which all ranks know.
  void follow(double total) {
    constexpr double kFar = 16.0;
    if (total > 0.0 && (!reference_ || total > *reference_ * kFar || total < *reference_ / kFar)) reference_ = total;
  }
  void wait_for_total();

  const Context& context_;
  const Divisor& divisor_;
  const StepEvents& events_;
  Step& step_;
  GradMarks& marks_;

  std::atomic<Phase> phase_{Phase::kNone};
  std::mutex mutex_;          // held while a backward's first gradient changes the phase
  double count_ = 0.0;        // added to the total by that backward
  bool drops_ = false;        // its weight is 0
  int64_t first_param_ = -1;  // the parameter whose gradient arrived first

  std::atomic<bool> has_unweighted_{false};  // gradients arrived without an announced weight

  bool open_ = false;  // there are weighted gradients that are not reduced yet
  double own_ = 0.0;   // this rank's share of the total
  double unit_ = 0.0;  // the last weight above 0
  bool ends_ = true;   // no further reduction belongs to the step
  std::vector<Part> parts_;
  double reduced_ = 0.0;  // own_ of the last reduced step

  std::optional<double> reference_;  // R
  at::Tensor total_;                 // of this step, on the parameters' device
  std::unique_ptr<transport::Work> work_;
  at::Tensor factor_;  // R / total_; undefined if it is 1 or not known yet
  // On a GPU: buckets with an owner are corrected during backward, some of them perhaps on another stream than the one that
  // computes the factor. Null elsewhere.
  const std::unique_ptr<gpu::BucketStreams> streams_;
};

}  // namespace torchddp::reducer
