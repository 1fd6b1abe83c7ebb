#include "reducer/pack/pack_rules.h"

#include <c10/util/Exception.h>

#include "common/check.h"

namespace torchddp::reducer {

bool PackRules::becomes_view(const bucket::Bucket& bucket, const at::Tensor& grad, bool unused,
                             const at::Tensor* incoming) const {
  return layout.gives_views(bucket) && !unused && !grad.requires_grad() && context.rpc == nullptr &&
         (!context.keeps_apart() || bucket::is_unshared(grad, incoming));
}

void PackRules::leave_to_holders(const BucketLayout::Place& place) const {
  if (place.slot->leave_to_holders()) [[likely]] {
    return;
  }
  for (const auto param : place.bucket->move(*context.transport)) {
    step.add_late(param);
  }
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

void PackRules::stays(int64_t param, const at::Tensor& grad) const {
  warn_create_graph(grad);
  step.add_late(param);
}

void warn_create_graph(const at::Tensor& grad) {
  if (grad.requires_grad()) {
    TORCH_WARN_ONCE(
        "backward(create_graph=True) under DistributedDataParallel averages the gradients, but not what is "
        "differentiated through them: higher-order gradients are not synchronized across ranks.");
  }
}

}  // namespace torchddp::reducer
