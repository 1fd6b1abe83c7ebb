// Static graphs: how often each gradient hook fires per step, recorded once and then expected in every step.
#pragma once

#include <cstdint>
#include <vector>

#include "reducer/base/context.h"

namespace torchddp::reducer {

class StaticGraph {
 public:
  explicit StaticGraph(const Context& context) : context_(context) {}

  void enable();
  bool enabled() const { return enabled_; }
  // The first synchronized backward reduces nothing until it ends, because only then is it known which firing is the last.
  bool recording() const { return enabled_ && !recorded_; }
  bool replaying() const { return enabled_ && recorded_; }
  // Whether the other ranks record in this step, too. Not if this rank had no inputs when they did (join).
  bool all_record() const { return recording() && !others_recorded_; }
  void note_others_recorded() { others_recorded_ = true; }

  // The recording is complete, or a new one begins.
  void finish_recording() { recorded_ = true; }
  void restart_recording();
  void begin_step();

  // A parameter's hook has fired. True if its gradient is complete, which is always so when no graph is expected. Throws
  // GraphError if the hook has fired more often than in the recorded step.
  bool is_last(int64_t param, const at::Tensor* incoming) { return !enabled_ || count(param, incoming); }
  bool was_used(int64_t param) const { return expected_[static_cast<size_t>(param)] != 0; }

 private:
  bool count(int64_t param, const at::Tensor* incoming);

  const Context& context_;
  bool enabled_ = false;
  bool recorded_ = false;
  bool others_recorded_ = false;
  std::vector<int32_t> expected_;
  std::vector<int32_t> left_;
};

}  // namespace torchddp::reducer
