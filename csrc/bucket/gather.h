// Many gradients into or out of their slots at once: one kernel launch a bucket on CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "bucket/grad_slot.h"

namespace torchddp::bucket {

// Slots of one bucket's flat memory, which is not on the CPU, and the tensors that go there. Works on the current stream.
class Gather {
 public:
  explicit Gather(double scale) : scale_(scale) {}

  // slot <- gradient * scale, for any gradient of the slot's shape.
  void add(GradSlot& slot, const at::Tensor& gradient) { pairs_.push_back({&slot, gradient}); }
  // slot <- slot * scale
  void add_in_place(GradSlot& slot) { pairs_.push_back({&slot, slot.view()}); }
  // Queues everything. The gradients must stay alive until it has returned.
  void run();

 private:
  struct Pair {
    GradSlot* slot;
    at::Tensor gradient;
  };
  double scale_;
  std::vector<Pair> pairs_;
};

// The way back.
class Scatter {
 public:
  // gradient <- slot; the gradient has memory of its own.
  void add(const GradSlot& slot, const at::Tensor& gradient) { pairs_.push_back({&slot, gradient}); }
  void run();

 private:
  struct Pair {
    const GradSlot* slot;
    at::Tensor gradient;
  };
  std::vector<Pair> pairs_;
};

}  // namespace torchddp::bucket
