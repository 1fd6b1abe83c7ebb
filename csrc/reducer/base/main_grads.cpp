#include "reducer/base/main_grads.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace torchddp::reducer {

void MainGrads::take(int64_t param, at::Tensor incoming, bool packed) {
  if (incoming.requires_grad()) {
    TORCH_WARN_ONCE(
        "backward(create_graph=True) under DistributedDataParallel with main gradients only keeps their values: they "
        "can't be differentiated further.");
    incoming = incoming.detach();
  }
  TDDP_CHECK(slots_[param] != nullptr, "there are no buckets: an error interrupted their creation");
  auto& grad = of(param);
  if (grad.defined()) {
    widen(param);
    slots_[param]->add(incoming);
    return;
  }
  grad = std::move(incoming);
  if (!packed) widen(param);
}

void MainGrads::widen(int64_t param) {
  auto& grad = grads_[param];
  auto& slot = *slots_[param];
  if (slot.holds(grad)) return;
  if (!slot.try_pack(grad, 1.0)) slot.pack(grad, 1.0);
  slot.restore_view();
  grad = slot.view();
}

void MainGrads::clear(int64_t param) {
  if (of(param).defined()) {
    grads_[param].reset();
    if (slots_[param] != nullptr) {
      slots_[param]->zero();
    } else {
      shown_[param].zero_();  // the reducer is closed, or an error interrupted the creation of its buckets
    }
    note_version(param);
  }
}

void MainGrads::leave_slots() {
  for (int64_t param = 0; param < std::ssize(slots_); ++param) of(param);
  std::fill(slots_.begin(), slots_.end(), nullptr);
}

void MainGrads::move_to(bucket::GradSlot& slot, int64_t param) {
  slots_[param] = &slot;
  if (grads_[param].defined()) {
    widen(param);
  } else {
    slot.zero();
  }
  slot.show_as(shown_[param]);
  note_version(param);
}

}  // namespace torchddp::reducer
