// Packs each gradient in its hook, while it is in cache. Used on the CPU.
#pragma once

#include "reducer/pack/pack_rules.h"

namespace torchddp::reducer {

// Called by autograd threads, each for its own parameters.
class HookPacker {
 public:
  explicit HookPacker(const PackRules& rules) : rules_(rules) {}

  // `grad`: the gradient of `param`. param.grad may be another tensor afterwards.
  void pack(int64_t param, at::Tensor& grad, bool unused, const at::Tensor* incoming) const;

 private:
  void pack_given_away(int64_t param, at::Tensor& grad, bool unused, const at::Tensor* incoming) const;
  void copy_into(int64_t param, bucket::GradSlot& slot, const at::Tensor& grad) const;
  // For a gradient that already lies in its slot.
  void scale(const BucketLayout::Place& place) const;
  void look_in_place(int64_t param, const BucketLayout::Place& place, const at::Tensor& grad) const;

  const PackRules& rules_;
};

}  // namespace torchddp::reducer
