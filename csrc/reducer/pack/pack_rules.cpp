#include "reducer/pack/pack_rules.h"

#include <c10/util/Exception.h>

#include "common/check.h"

namespace torchddp::reducer {

bool PackRules::may_adopt(const bucket::Bucket& bucket, const at::Tensor& grad, bool unused,
                          const at::Tensor* incoming) const {
  return !unused && !packed.shows_own() && layout.gives_views(bucket) && !grad.requires_grad() &&
         context.rpc == nullptr && bucket::is_unshared(grad, incoming);
}

void PackRules::copied(int64_t param, at::Tensor& grad, bool unused) const {
  warn_create_graph(grad);
  const auto& place = layout.place(param);
  const bool at_once = !context.keeps_apart() || packed.are_left_to_optimizer();
  const bool in_place =
      at_once && !unused && layout.gives_views(*place.bucket) && !grad.requires_grad() && context.rpc == nullptr;
  if (in_place) {
    place.slot->restore_view();
    grad = place.slot->view();
  }
  if (!unused) {
    packed.note(param, grad, in_place);
  }
}

void PackRules::leave_to_holders(const BucketLayout::Place& place) const {
  if (place.slot->leave_to_holders()) [[likely]] {
    return;
  }
  place.bucket->move(*context.transport);
}

void PackRules::check(int64_t param, const at::Tensor& grad) const {
  const auto& slot = *layout.place(param).slot;
  const auto& name = context.spec(param).name;
  const auto expected = grad_dtype_.value_or(slot.grad_dtype());
  TDDP_CHECK(grad.scalar_type() == expected, "parameter '", name, "' on rank ", context.rank(),
             ": expected a gradient of dtype ", expected, ", got ", grad.scalar_type(),
             ". The model was changed after it was wrapped; wrap it again.");
  TDDP_CHECK(grad.layout() == at::kStrided, "parameter '", name, "' on rank ", context.rank(), ": got a ",
             grad.layout(), " gradient; sparse ones need a module with sparse=True when the model is wrapped.");
  TDDP_CHECK(grad.numel() == slot.numel() && grad.sizes() == slot.sizes(), "parameter '", name, "' on rank ",
             context.rank(), ": the gradient has shape ", grad.sizes(), ", its bucket slot ", slot.sizes(),
             ". The model was changed after it was wrapped; wrap it again.");
}

void warn_create_graph(const at::Tensor& grad) {
  if (grad.requires_grad()) {
    TORCH_WARN_ONCE(
        "backward(create_graph=True) under DistributedDataParallel averages the gradients, but not what is "
        "differentiated through them: higher-order gradients are not synchronized across ranks.");
  }
}

}  // namespace torchddp::reducer
