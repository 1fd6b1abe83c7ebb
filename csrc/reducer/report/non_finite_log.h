// Which of this rank's own gradients were infinite or NaN before they were averaged.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

namespace torchddp::reducer {

struct NonFiniteGrad {
  int64_t step;
  int64_t param;
  int64_t count;  // elements, or kUncounted
};
inline constexpr int64_t kUncounted = -1;

// Note [Episodes]
// Once a non-finite value has reached the weights, every gradient of every later step is non-finite too. So the log keeps an
// episode: consecutive steps with such gradients, with the first occurrence for each parameter. After steps without any, a new
// episode replaces the old one.
//
// Thread-safe: autograd threads write, a watcher reads.
class NonFiniteLog {
 public:
  explicit NonFiniteLog(int64_t num_params) : seen_(static_cast<size_t>(num_params), 0) {}

  void note(int64_t step, int64_t param, int64_t count);
  // Checks whether each gradient (some of the parameters, all on one device) is finite: queued on the current stream, known
  // later.
  void look(int64_t step, const std::vector<int64_t>& params, const std::vector<at::Tensor>& grads);
  // Makes everything noted so far visible to readers. Called at the end of a step, so that they see it all at once.
  void publish();

  // Increases when there is something new to read. Does not wait.
  int64_t version();
  // The last episode. Waits for devices.
  std::vector<NonFiniteGrad> episode();

 private:
  struct Pending {
    int64_t step;
    std::vector<int64_t> params;
    at::Tensor finite;  // bool, on the host
    std::optional<c10::Event> known;
  };
  void collect(bool wait);
  void add(int64_t step, int64_t param, int64_t count);

  std::mutex mutex_;
  std::vector<uint8_t> seen_;  // by parameter: part of the episode
  std::vector<NonFiniteGrad> episode_;
  int64_t last_step_ = -1;  // last step of the episode
  int64_t version_ = 0;
  int64_t published_ = 0;
  std::deque<Pending> pending_;
};

}  // namespace torchddp::reducer
