// What becomes of what a forward has returned: whether a backward goes through it before it is gone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace torchddp::reducer {

// Outputs tell it themselves, from whichever thread runs a backward or lets go of them: nothing is asked for in a step. watch() and
// reduced() come from the training thread, or from that of the backward that it waits for.
class ForwardWatch {
 public:
  ForwardWatch();

  // Forwards have numbers that grow. `outputs`: all tensors that the program got; those without a graph tell nothing.
  void watch(int64_t forward, std::span<const at::Tensor> outputs);
  // Gradients were averaged: no forward so far was in vain.
  void reduced();

  // The last forward whose outputs are all gone, though no backward went through them, nor were gradients averaged meanwhile; and the
  // last through whose outputs a backward went. -1: none.
  std::pair<int64_t, int64_t> left_and_used() const;

  struct Fates;

 private:
  std::shared_ptr<Fates> fates_;  // outputs may outlive this
};

}  // namespace torchddp::reducer
