#include "reducer/graph/static_graph.h"

#include "common/errors.h"
#include "reducer/report/messages.h"

namespace torchddp::reducer {

void StaticGraph::enable() {
  enabled_ = true;
  others_recorded_ = false;
  restart_recording();
}

void StaticGraph::restart_recording() {
  recorded_ = false;
  expected_.assign(context_.params.size(), 0);
  left_ = expected_;
}

void StaticGraph::begin_step() {
  if (recording()) {
    restart_recording();  // left by a step that failed
  }
  left_ = expected_;
}

bool StaticGraph::count(int64_t param, const at::Tensor* incoming) {
  const auto index = static_cast<size_t>(param);
  if (incoming == nullptr && left_[index] <= 0) {
    // This belongs to an output that the loss doesn't use: torch's sink, present only in the recorded step, leads here.
    bool lacking = false;
    context_.with_grad(param, [&](const at::Tensor& grad) { lacking = !grad.defined(); });
    if (lacking) {
      return false;
    }
  }
  if (!recorded_) {
    ++expected_[index];
    return false;
  }
  if (left_[index] <= 0) {
    throw GraphError(static_graph_changed_message(context_.rank(), param, context_.specs));
  }
  return --left_[index] == 0;
}

}  // namespace torchddp::reducer
