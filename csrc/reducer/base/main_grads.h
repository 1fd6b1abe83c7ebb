// Gradients that add up beside .grad, in fp32 where parameters have 16 bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "bucket/grad_slot.h"

namespace torchddp::reducer {

// Note [Main gradients]
// As Megatron keeps them: what autograd leaves in .grad is added to memory of the bucket, in the hook, and .grad is None again. Of each
// parameter there are two tensors. The gradient, as packers and the rest of the reducer know it in the place of .grad: undefined once it
// was cleared; then what has come last, until it is packed; then the view of its slot. And the one that the program sees as
// param.main_grad: always the same tensor, over the slot's memory wherever that is. Between steps a slot is zero where the gradient is
// undefined, so the first gradient after that overwrites it, which is one pass over memory and not two.
//
// A parameter's own hook alone calls take(); the rest comes from the training thread, between steps.
class MainGrads {
 public:
  explicit MainGrads(size_t num_params) : grads_(num_params), shown_(num_params), versions_(num_params, 0) {}

  at::Tensor& of(int64_t param) { return grads_[static_cast<size_t>(param)]; }
  // By parameter: what the program sees.
  const std::vector<at::Tensor>& shown() const { return shown_; }

  // `came`: from .grad. `packed`: it is going to be packed in this backward; otherwise it is added to the slot here.
  void take(int64_t param, at::Tensor came, bucket::GradSlot& slot, bool packed);
  // Into a slot of new buckets.
  void move(int64_t param, bucket::GradSlot& slot);
  void clear(int64_t param, bucket::GradSlot& slot);

 private:
  void widen(at::Tensor& grad, bucket::GradSlot& slot) const;
  // The program has written to it since it was cleared.
  bool was_written(size_t param) const;
  void note_version(size_t param);

  std::vector<at::Tensor> grads_;
  std::vector<at::Tensor> shown_;
  std::vector<uint32_t> versions_;  // of what is shown, when it was cleared
};

}  // namespace torchddp::reducer
