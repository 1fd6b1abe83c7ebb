#include "reducer/pack/packed_grads.h"

#include <c10/util/Exception.h>

#include <stdexcept>
#include <utility>

namespace torchddp::reducer {

void PackedGrads::begin_step(bool has_hooks) {
  has_hooks_ = has_hooks;
  packed_.assign(packed_.size(), {});
  written_.clear();
}

void PackedGrads::begin_backward(bool has_hooks) {
  // With gradient_as_bucket_view=True, main_grads= and sharded models the program has asked for gradients in buckets.
  shows_own_ = (has_hooks_ || has_hooks) && context_.keeps_apart() && !context_.owned && !left_to_optimizer_;
}

void PackedGrads::tell() {
  for (const auto param : std::exchange(written_, {})) {
    const auto text =
        c10::str("parameter '", context_.spec(param).name, "' on rank ", context_.rank(),
                 ": its gradient was written during backward, after it had been packed for the reduction");
    if (packed_[static_cast<size_t>(param)].in_place) {
      throw std::runtime_error(
          c10::str(text,
                   " and while it was being reduced, so the averages of this step may be wrong on any rank. "
                   "Write gradients after backward(), or in a hook of the parameter itself."));
    }
    TORCH_WARN_ONCE(
        text,
        ". The average replaces it, as with torch's class, so the write has no effect. Write gradients after "
        "backward(), or in a hook of the parameter itself.");
  }
}

}  // namespace torchddp::reducer
