// What gradients are divided by: over how many ranks they are averaged.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>

#include "reducer/base/context.h"
#include "reducer/reduce/comm_hook.h"
#include "reducer/report/events.h"

namespace torchddp::reducer {

class Divisor {
 public:
  Divisor(const Context& context, const CommHook& hook, const StepEvents& events)
      : context_(context), hook_(hook), events_(events) {}

  // `divisor` is asked once in each backward that reduces: for groups that change between steps.
  void set(std::function<int64_t()> divisor) { divisor_ = std::move(divisor); }
  // Under join(): an all-reduce of how many ranks have inputs, unless it is always to be the world size.
  void set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool use_static_world_size);
  // Of a step that has ended or failed.
  void forget_forward_work() { forward_work_.reset(); }

  // Whether the number of ranks may differ from step to step.
  bool changes() const { return divisor_ != nullptr; }
  // What a communication hook divides by; 1 without one.
  double of_hooks() const;
  // What a step's gradients are multiplied by while they are packed. A communication hook divides by itself.
  double scale() const {
    const auto divisor = static_cast<double>(get());
    return hook_ ? 1.0 : 1.0 / divisor;
  }

 private:
  int64_t ranks() const;
  int64_t get() const;

  const Context& context_;
  const CommHook& hook_;
  const StepEvents& events_;
  std::function<int64_t()> divisor_;
  c10::intrusive_ptr<c10d::Work> forward_work_;
  bool use_static_world_size_ = false;
};

}  // namespace torchddp::reducer
