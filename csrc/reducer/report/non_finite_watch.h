// Looks for gradients that are infinite or NaN: this rank's own, and the averages.
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
// Ranks need not tell each other that a step went wrong: a NaN or an infinity of one rank makes the average NaN or infinite on all, with
// the same bits, and so does a sum that overflows. Each rank looks at the averages, which say the same everywhere. Where the transport has
// looked at all of them while it summed, only those of a bucket with a bad one are read again, to name parameters.
//
// Does nothing unless the configuration asks for it. Own gradients are noted by autograd's threads, averages by one thread at a time.
class NonFiniteWatch {
 public:
  NonFiniteWatch(const Context& context, const StepEvents& events);

  bool on() const { return log_ != nullptr; }
  // `count` elements of a gradient of this rank are not finite.
  void note(int64_t param, int64_t count) {
    if (count > 0) [[unlikely]] {
      log_->note(events_.steps(), param, count);
    }
  }
  // Reads a gradient.
  void look_at(int64_t param, const at::Tensor& grad);
  // Of one device; queued.
  void look_at(const std::vector<int64_t>& params, const std::vector<at::Tensor>& grads);
  // Reads the averages of a bucket, unless its reduction knows that they are finite.
  void look_at_average(const bucket::Bucket& bucket, bool known_finite);

  void begin_step() { bad_averages_.clear(); }
  // From now on readers see what was noted in this step.
  void publish();
  // Throws NonFiniteError if an average was bad.
  void raise_if_bad();

  // What NonFiniteLog::episode and version tell; nothing unless gradients are looked at. From any thread.
  std::vector<NonFiniteGrad> episode() { return on() ? log_->episode() : std::vector<NonFiniteGrad>(); }
  int64_t version() { return on() ? log_->version() : 0; }

 private:
  const Context& context_;
  const StepEvents& events_;
  const std::unique_ptr<NonFiniteLog> log_;
  std::vector<int64_t> bad_averages_;
};

}  // namespace torchddp::reducer
