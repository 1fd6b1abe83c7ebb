#include "reducer/report/backward_watch.h"

#include <torch/csrc/autograd/graph_task.h>

#include <cstddef>

namespace torchddp::reducer {
namespace {

using torch::autograd::GraphTask;

ErrorTypeName error_type_name = nullptr;

std::string describe(c10::ivalue::Future& future) {
  const auto type = error_type_name == nullptr ? std::string() : error_type_name(future.exception_ptr());
  const auto message = future.tryRetrieveErrorMessage();
  return type.empty() ? message : type + ": " + message;
}

// Note [The graph task of this thread]
// torch exports the address of one of the class's members, and its id. We are compiled for one minor version of torch, so the
// class layout is known; the id confirms that it is the expected one.
GraphTask* current_graph_task() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) {
    return nullptr;
  }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  const auto offset = offsetof(GraphTask, nodes_in_graph_);
#pragma GCC diagnostic pop
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast)
  auto* task = reinterpret_cast<GraphTask*>(reinterpret_cast<uintptr_t>(nodes) - offset);
  return static_cast<int>(task->id_) == torch::autograd::get_current_graph_task_id() ? task : nullptr;
}

}  // namespace

void set_error_type_name(ErrorTypeName name) { error_type_name = name; }

void watch_backward(const std::shared_ptr<LiveStatus>& status) {
  const auto number = status->begin_backward();
  const auto* task = current_graph_task();
  if (task == nullptr || task->reentrant_depth_ != 0 || task->future_result_ == nullptr) {
    return;
  }
  task->future_result_->addCallback(
      [weak = std::weak_ptr<LiveStatus>(status), number](c10::ivalue::Future& future) {
        const auto live = weak.lock();
        if (live == nullptr) {
          return;
        }
        if (future.hasError()) {
          const auto text = describe(future);
          live->end_backward(number, &text);
        } else {
          live->end_backward(number, nullptr);
        }
      },
      /*uses_future=*/false);
}

}  // namespace torchddp::reducer
