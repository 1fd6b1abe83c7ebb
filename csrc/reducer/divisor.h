// The number of ranks that gradients are averaged over.
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

  // `divisor` is called once in each backward that reduces, for groups whose size changes between steps.
  void set(std::function<int64_t()> divisor) { divisor_ = std::move(divisor); }
  // Under join(): the all-reduce that counts the ranks with inputs, unless the divisor is always the world size.
  void set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool use_static_world_size);
  // After a step that ended or failed.
  void forget_forward_work() { forward_work_.reset(); }

  // Whether the number of ranks may differ from step to step.
  bool changes() const { return divisor_ != nullptr; }
  // What a communication hook divides by; 1 if there is none.
  double of_hooks() const;
  // The factor applied while a step's gradients are packed. A communication hook divides by itself.
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
