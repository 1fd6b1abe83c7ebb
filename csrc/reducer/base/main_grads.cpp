#include "reducer/base/main_grads.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <utility>

namespace torchddp::reducer {

void MainGrads::take(int64_t param, at::Tensor came, bucket::GradSlot& slot, bool packed) {
  const auto index = static_cast<size_t>(param);
  auto& grad = grads_[index];
  if (came.requires_grad()) {
    TORCH_WARN_ONCE(
        "backward(create_graph=True) under DistributedDataParallel with main gradients keeps their values only: "
        "nothing "
        "can be differentiated through them.");
    came = came.detach();
  }
  if (!grad.defined() && was_written(index)) {
    grad = slot.view();
  }
  if (!grad.defined()) {
    grad = std::move(came);
    if (!packed) {
      widen(grad, slot);
    }
    return;
  }
  widen(grad, slot);
  slot.add(came);
}

void MainGrads::widen(at::Tensor& grad, bucket::GradSlot& slot) const {
  if (slot.holds(grad)) {
    return;
  }
  if (!slot.try_pack(grad, 1.0)) {
    slot.pack(grad, 1.0);
  }
  slot.restore_view();
  grad = slot.view();
}

void MainGrads::move(int64_t param, bucket::GradSlot& slot) {
  const auto index = static_cast<size_t>(param);
  if (grads_[index].defined()) {
    widen(grads_[index], slot);
  } else if (was_written(index)) {
    slot.pack(shown_[index], 1.0);
    grads_[index] = slot.view();
  } else {
    slot.zero();
  }
  slot.show_as(shown_[index]);
  note_version(index);
}

void MainGrads::clear(int64_t param, bucket::GradSlot& slot) {
  const auto index = static_cast<size_t>(param);
  if (grads_[index].defined() || was_written(index)) {
    grads_[index].reset();
    slot.zero();
    note_version(index);
  }
}

bool MainGrads::was_written(size_t param) const {
  const auto& shown = shown_[param];
  return shown.defined() && shown.unsafeGetTensorImpl()->version_counter().current_version() != versions_[param];
}

void MainGrads::note_version(size_t param) {
  versions_[param] = shown_[param].unsafeGetTensorImpl()->version_counter().current_version();
}

}  // namespace torchddp::reducer
