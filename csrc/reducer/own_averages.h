// Averages that one rank alone has, because its buckets belong to it.
#pragma once

#include <span>
#include <vector>

#include "reducer/base/step.h"
#include "reducer/reduce/layout.h"

namespace torchddp::reducer {

// Note [Averages that one rank has]
// After a synchronised backward the owner's .grad is an average, and the others have none. A further backward without zero_grad()
// in between must not be averaged together with it: rank by rank it is there once, not on all. So before autograd adds to such a
// gradient the hook puts it aside, and it is added to the next average. Under no_sync() there is no next average yet, and what
// the user does to .grad meanwhile (zero_grad) would miss what was put aside: that is an error, unless it is all zeros.
//
// Does nothing unless buckets have owners.
class OwnAverages {
 public:
  OwnAverages(const Context& context, const Step& step, const BucketLayout& layout);

  // Autograd, or the reducer, is about to add to a gradient.
  void coming(int64_t param) {
    if (context_.owned) {
      put_aside(param);
    }
  }
  // What an abandoned step has left.
  void begin_step() { kept_.assign(kept_.size(), at::Tensor()); }
  // The averages of this step are in .grad.
  void finish();

  // Knows what those before have known. `places`: where each parameter was there, or kNotThere.
  void take_over(const OwnAverages& before, std::span<const int64_t> places);

 private:
  void put_aside(int64_t param);

  const Context& context_;
  const Step& step_;
  const BucketLayout& layout_;
  std::vector<uint8_t> reduced_;  // by parameter: its gradient is such an average
  std::vector<at::Tensor> kept_;  // such averages, while a backward adds to them
};

}  // namespace torchddp::reducer
