// Gradients accumulated beside .grad, in fp32 for 16-bit parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "bucket/grad_slot.h"

namespace torchddp::reducer {

// Note [Main gradients]
// As in Megatron: the hook adds what autograd left in .grad to bucket memory and sets .grad back to None. Each parameter has
// two tensors. One is the gradient as the packers and the rest of the reducer see it instead of .grad: undefined once cleared,
// then the latest gradient until it is packed, then the view of its slot. The other is what the program sees as
// param.main_grad: always the same tensor, over the slot's memory wherever that is. Between steps a slot is zero where the
// gradient is undefined, so the first gradient overwrites it, which takes one pass over memory instead of two. If the program
// has written to main_grad in the meantime (its version counter tells), that value is the gradient.
//
// Only a parameter's own hook calls take(). All other calls come from the training thread, between steps.
class MainGrads {
 public:
  explicit MainGrads(size_t num_params)
      : grads_(num_params), shown_(num_params), versions_(num_params, 0), slots_(num_params, nullptr),
        is_left_(num_params) {}

  at::Tensor& of(int64_t param) {
    auto& grad = grads_[param];
    if (!grad.defined()) [[unlikely]] {
      take_what_was_written(param);
    }
    return grad;
  }
  // The tensors the program sees, by parameter.
  const std::vector<at::Tensor>& shown() const { return shown_; }

  // `incoming`: taken from .grad. `packed`: this backward will pack it; otherwise it is added to the slot here.
  void take(int64_t param, at::Tensor incoming, bool packed);
  // Drops what has been accumulated.
  void clear(int64_t param);
  // If off, the parameter's gradients are left in .grad, for another reducer with main gradients.
  void set_taken(int64_t param, bool taken) { is_left_[param] = !taken; }
  bool is_taken(int64_t param) const { return !is_left_[param]; }
  // Where it is kept; null without buckets.
  const bucket::GradSlot* slot(int64_t param) const { return slots_[param]; }

  // Called before the buckets are replaced, when the old slots go away; then, for each parameter, its new slot.
  void leave_slots();
  void move_to(bucket::GradSlot& slot, int64_t param);

 private:
  // Moves a gradient into its slot, in the slot's dtype, unless it is already there.
  void widen(int64_t param);
  void take_what_was_written(int64_t param) {
    auto* const slot = slots_[param];
    if (slot != nullptr &&
        shown_[param].unsafeGetTensorImpl()->version_counter().current_version() != versions_[param]) {
      slot->restore_view();
      grads_[param] = slot->view().detach();  // not the tensor that was cleared
    }
  }
  void note_version(int64_t param) {
    versions_[param] = shown_[param].unsafeGetTensorImpl()->version_counter().current_version();
  }

  // Each by parameter.
  std::vector<at::Tensor> grads_;
  std::vector<at::Tensor> shown_;
  std::vector<uint32_t> versions_;  // of the shown tensor when it was cleared
  std::vector<bucket::GradSlot*> slots_;
  std::vector<bool> is_left_;  // to another reducer
};

}  // namespace torchddp::reducer
