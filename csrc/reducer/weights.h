// Weighted means: what each backward's gradients count for.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "bucket/bucket.h"
#include "reducer/divisor.h"

namespace torchddp::reducer {

// Note [Weighted means]
// With weights w (samples, tokens), gradients become sum(w g) / sum(w) over the ranks and the backwards of a step; without, they
// become sum(g) / world_size.
//   Packing multiplies gradients by w / R, where R is the total weight of the first weighted step, or, on a CPU, of the last one whose
//   total was far from it. What travels then has the size of an average, which 16-bit wires can hold; and if all weights are equal it is
//   the plain average, to the bit.
//   This rank's part of the total is summed beside the first bucket. Each bucket's sum is then multiplied by R / total, which costs a
//   pass over it, unless the total is R.
//   Between the backwards of a step .grad holds sum(w g) / unit, where unit is the last weight: the next backward adds to it as ever,
//   and what is there is rescaled only where the weight changes.
//   A backward of weight 0 counts for nothing even if its gradients are NaN, as those of a mean over no samples are.
//
// coming() is called by autograd's threads, everything else by one thread at a time.
class Weights {
 public:
  Weights(const Context& context, const Divisor& divisor, const StepEvents& events)
      : context_(context), divisor_(divisor), events_(events) {}

  // Of the next backward: its gradients are multiplied by `weight`, and `count` is added to what the sum is divided by. `goes_on`: it
  // belongs to the same step as the backwards that were reduced before it.
  void announce(double weight, double count, bool goes_on);
  // Autograd is about to add `incoming` to the gradient of a parameter, in a backward that reduces or not. `may_repeat`: one backward may
  // bring a parameter several gradients.
  void coming(int64_t param, bool reduces, bool may_repeat, at::Tensor& incoming);
  // It has. Called also if the model does not listen.
  void came(bool reduces);

  // A reduction begins. Returns what gradients are multiplied by while they are packed.
  double begin();
  // Makes the sum in a bucket a mean.
  void correct(bucket::Bucket& bucket);
  // The reduction has ended.
  void finish();
  // Throws ZeroWeightError if no rank gave the last step a weight above 0, unless that is allowed.
  void raise_if_zero();
  // The reduction has failed.
  void abandon();
  // Another reducer goes on with the same model, between steps.
  void take_over(const Weights& before);
  // Whether it must hear of gradients that are coming.
  bool listens() const { return open_ || context_.config.weighted; }
  // Before ranks join or leave.
  void forget_total() { reference_.reset(); }
  // Collective, of a rank without inputs: takes part with weight 0 if the model's steps are weighted.
  void match();

 private:
  void check_unannounced(int64_t param, bool reduces);

  // Of the backward that was announced last.
  enum class Phase : uint8_t { kNone, kAnnounced, kCame };

  bool has_gradients() const;
  bool has_values() const;
  void rescale(double factor) const;
  // Lets R follow the total, which all ranks know.
  void follow(double total);
  void start_exchange(double count);
  void wait_for_total();
  double agreed_total(double count);

  const Context& context_;
  const Divisor& divisor_;
  const StepEvents& events_;

  std::atomic<Phase> phase_{Phase::kNone};
  std::mutex mutex_;          // while a backward's first gradient changes the phase
  double count_ = 0.0;        // what that backward adds to the total
  bool drops_ = false;        // its weight is 0
  int64_t first_param_ = -1;  // whose gradient came first in it

  std::atomic<bool> has_unweighted_{false};  // gradients came of which nobody knows the weight

  bool open_ = false;     // gradients that are not reduced yet have weights
  double own_ = 0.0;      // this rank's part of the total
  double unit_ = 0.0;     // see the note
  double reduced_ = 0.0;  // own_ of the last step that was reduced

  std::optional<double> reference_;  // R
  at::Tensor total_;                 // of this step, on the parameters' device
  std::unique_ptr<transport::Work> work_;
  at::Tensor factor_;  // R / total_; undefined if it is 1, or not known yet
};

}  // namespace torchddp::reducer
