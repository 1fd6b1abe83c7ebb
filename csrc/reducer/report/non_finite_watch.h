// Looks for infinite and NaN gradients: this rank's own, and the averages.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bucket/bucket.h"
#include "reducer/base/context.h"
#include "reducer/report/events.h"
#include "reducer/report/non_finite_log.h"

namespace torchddp::reducer {

// Note [Non-finite averages]
// Ranks need not tell each other that a step went wrong. A NaN or infinity on one rank makes the average non-finite on all of
// them, with the same bits, and so does an overflowing sum. Each rank checks the averages, which agree everywhere. Where the
// transport has checked them while summing, only buckets with a bad value are read again, to name the parameters.
//
// Does nothing unless configured. Autograd threads note own gradients; averages are noted by one thread at a time.
class NonFiniteWatch {
 public:
  NonFiniteWatch(const Context& context, const StepEvents& events);

  bool on() const { return log_ != nullptr; }
  // `count` elements of one of this rank's gradients are not finite.
  void note(int64_t param, int64_t count) {
    if (count > 0) [[unlikely]] {
      log_->note(events_.steps(), param, count);
    }
  }
  // Checks one gradient.
  void look_at(int64_t param, const at::Tensor& grad);
  // Checks gradients of one device; queued on its stream.
  void look_at(const std::vector<int64_t>& params, const std::vector<at::Tensor>& grads);
  // Checks the averages of a bucket, unless its reduction has already found them finite.
  void look_at_average(const bucket::Bucket& bucket, bool known_finite);

  void begin_step() { bad_averages_.clear(); }
  // Makes what was noted in this step visible to readers.
  void publish();
  // Throws NonFiniteError if an average was not finite.
  void raise_if_bad();

  // NonFiniteLog's episode and version; empty unless gradients are checked. Thread-safe.
  std::vector<NonFiniteGrad> episode() { return on() ? log_->episode() : std::vector<NonFiniteGrad>(); }
  int64_t version() { return on() ? log_->version() : 0; }

 private:
  const Context& context_;
  const StepEvents& events_;
  const std::unique_ptr<NonFiniteLog> log_;
  std::vector<int64_t> bad_averages_;
};

}  // namespace torchddp::reducer
