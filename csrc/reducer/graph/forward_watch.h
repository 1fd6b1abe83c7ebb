// Whether a backward runs through the outputs of a forward before they are destroyed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace torchddp::reducer {

// The outputs report it themselves, from whichever thread runs the backward or drops the last reference, so a step pays
// nothing. watch() and reduced() are called by the training thread, or by the thread of a backward that it waits for.
class ForwardWatch {
 public:
  ForwardWatch();

  // Forward numbers increase. `outputs`: every tensor returned to the program; those without a graph report nothing.
  void watch(int64_t forward, std::span<const at::Tensor> outputs);
  // Gradients were averaged, so no forward up to now was wasted.
  void reduced();

  // First: the last forward whose outputs were all destroyed without a backward through them or a reduction in between. Second:
  // the last forward that a backward went through. -1 if there is none.
  std::pair<int64_t, int64_t> left_and_used() const;

  struct Fates;

 private:
  std::shared_ptr<Fates> fates_;  // outputs may outlive this object
};

}  // namespace torchddp::reducer
