// Infinities and NaNs in gradients and averages: noted, published and raised.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "bucket/bucket.h"
#include "reducer/base/context.h"
#include "reducer/report/events.h"

namespace torchddp::reducer {

// One of this rank's own gradients that was not finite before it was averaged.
struct NonFiniteGrad {
  int64_t step;
  int64_t param;
  int64_t count;  // elements, or kUncounted
};
inline constexpr int64_t kUncounted = -1;

// Note [Episodes]
// Once a non-finite value has reached the weights, every gradient of every later step is non-finite too. So an episode is kept:
// consecutive steps with such gradients, with the first occurrence for each parameter. After steps without any, a new episode
// replaces the old one.
//
// Note [Non-finite averages]
// Ranks need not tell each other that a step went wrong. A NaN or infinity on one rank makes the average non-finite on all of
// them, with the same bits, and so does an overflowing sum. Each rank checks the averages, which agree everywhere. Where the
// transport has checked them while summing, only buckets with a bad value are read again, to name the parameters.
//
// Does nothing unless configured. Thread-safe: autograd threads note own gradients, a watcher reads; averages are noted by one
// thread at a time.
class NonFiniteWatch {
 public:
  NonFiniteWatch(const Context& context, const StepEvents& events);

  bool on() const { return on_; }
  // `count` elements of one of this rank's gradients are not finite.
  void note(int64_t param, int64_t count) {
    if (count > 0) [[unlikely]] {
      const std::lock_guard lock(mutex_);
      add(events_.steps(), param, count);
    }
  }
  // Checks one gradient.
  void look_at(int64_t param, const at::Tensor& grad);
  // Checks gradients of one device, of some of the parameters: queued on its current stream, known later.
  void look_at(const std::vector<int64_t>& params, const std::vector<at::Tensor>& grads);
  // Checks the averages of a bucket, unless its reduction has already found them finite.
  void look_at_average(const bucket::Bucket& bucket, bool known_finite);

  void begin_step() { bad_averages_.clear(); }
  // Makes everything noted so far visible to readers. Called at the end of a step, so that they see it all at once.
  void publish() {
    if (!on_) return;
    const std::lock_guard lock(mutex_);
    published_ = version_;
  }
  // Throws NonFiniteError if an average was not finite.
  void raise_if_bad();

  // The last episode. Waits for devices.
  std::vector<NonFiniteGrad> episode() {
    const std::lock_guard lock(mutex_);
    collect(true);
    return episode_;
  }
  // Increases when there is something new to read. Does not wait.
  int64_t version() {
    const std::lock_guard lock(mutex_);
    collect(false);
    return published_;
  }

 private:
  struct Pending {
    int64_t step;
    std::vector<int64_t> params;
    at::Tensor finite;  // bool, on the host
    std::optional<c10::Event> known;
  };
  void collect(bool wait);
  void add(int64_t step, int64_t param, int64_t count);

  const Context& context_;
  const StepEvents& events_;
  const bool on_;
  std::vector<int64_t> bad_averages_;

  std::mutex mutex_;           // of the following
  std::vector<uint8_t> seen_;  // by parameter: part of the episode
  std::vector<NonFiniteGrad> episode_;
  int64_t last_step_ = -1;  // last step of the episode
  int64_t version_ = 0;
  int64_t published_ = 0;
  std::deque<Pending> pending_;
};

}  // namespace torchddp::reducer
