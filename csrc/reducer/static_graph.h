// Static graphs: how often each gradient hook fires in a step, recorded once and expected ever after.
#pragma once

#include <cstdint>
#include <vector>

namespace torchddp::reducer {

class StaticGraph {
 public:
  void enable(int64_t num_params) {
    enabled_ = true;
    recorded_ = false;
    expected_.assign(static_cast<size_t>(num_params), 0);
    left_ = expected_;
  }
  bool enabled() const { return enabled_; }
  // In the first synchronised backward nothing is reduced until it ends: only then is it known which hook firing is the last.
  bool recording() const { return enabled_ && !recorded_; }
  bool replaying() const { return enabled_ && recorded_; }

  void count(int64_t param) { ++expected_[static_cast<size_t>(param)]; }
  bool was_used(int64_t param) const { return expected_[static_cast<size_t>(param)] != 0; }
  void finish_recording() { recorded_ = true; }
  void restart_recording() { enable(static_cast<int64_t>(expected_.size())); }

  void begin_step() { left_ = expected_; }
  // False if the hook has fired more often than in the recorded step.
  bool expects(int64_t param) const { return left_[static_cast<size_t>(param)] > 0; }
  // True when this firing is the parameter's last one.
  bool fire(int64_t param) { return --left_[static_cast<size_t>(param)] == 0; }

 private:
  bool enabled_ = false;
  bool recorded_ = false;
  std::vector<int32_t> expected_;
  std::vector<int32_t> left_;
};

}  // namespace torchddp::reducer
