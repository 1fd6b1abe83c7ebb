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
// undefined, so the first gradient after that overwrites it, which is one pass over memory and not two. If the program has written to
// what it sees meanwhile (the tensor's version tells), that is the gradient.
//
// A parameter's own hook alone calls take(); the rest comes from the training thread, between steps.
class MainGrads {
 public:
  explicit MainGrads(size_t num_params)
      : grads_(num_params), shown_(num_params), versions_(num_params, 0), slots_(num_params, nullptr) {}

  at::Tensor& of(int64_t param) {
    auto& grad = grads_[static_cast<size_t>(param)];
    if (!grad.defined()) [[unlikely]] {
      take_what_was_written(param);
    }
    return grad;
  }
  // By parameter: what the program sees.
  const std::vector<at::Tensor>& shown() const { return shown_; }

  // `came`: from .grad. `packed`: it is going to be packed in this backward; otherwise it is added to the slot here.
  void take(int64_t param, at::Tensor came, bool packed);
  // What has been accumulated is dropped.
  void clear(int64_t param);

  // There are going to be new buckets, and the old slots go; then, for each parameter, its new slot.
  void leave_slots();
  void move_to(bucket::GradSlot& slot, int64_t param);

 private:
  // Into the slot, in the slot's dtype, unless it is there.
  void widen(size_t param);
  void take_what_was_written(int64_t param);
  void note_version(size_t param);

  // All by parameter.
  std::vector<at::Tensor> grads_;
  std::vector<at::Tensor> shown_;
  std::vector<uint32_t> versions_;  // of what is shown, when it was cleared
  std::vector<bucket::GradSlot*> slots_;
};

}  // namespace torchddp::reducer
