#include "reducer/pack/pack_rules.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <stdexcept>
#include <utility>

#include "common/check.h"
#include "transport/scaling.h"

namespace torchddp::reducer {

void PackedGrads::begin_backward(bool has_hooks) {
  // With gradient_as_bucket_view=True, main_grads= and sharded models the program has asked for gradients in buckets.
  shows_own_ = (has_hooks_ || has_hooks) && context_.has_own_storage() && !context_.owned && !left_to_optimizer_;
}

void PackedGrads::report() {
  for (const auto param : std::exchange(written_, {})) {
    const auto text =
        c10::str("parameter '", context_.spec(param).name, "' on rank ", context_.rank(),
                 ": its gradient was written during backward, after it had been packed for the reduction");
    if (packed_[param].in_place) {
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

at::Tensor no_rows(const at::Tensor& param) {
  return at::_sparse_coo_tensor_with_dims(1, param.dim() - 1, param.sizes(), param.options().layout(at::kSparse));
}

SparseGrad make_sparse_grad(const at::Tensor& grad, double scale, const std::string& name,
                            const std::optional<SparseMetadata>& metadata) {
  TDDP_CHECK(grad.defined(), "Expected sparse gradient to be defined: parameter '", name, "' got none");
  TDDP_CHECK(grad.layout() == at::kSparse, "Expected variable to have sparse gradient: parameter '", name,
             "' got a dense one; was its embedding made with sparse=False after wrapping?");
  SparseGrad result{grad, std::nullopt};
  if (metadata) {
    const auto found = metadata->find(name);
    TDDP_CHECK(found != metadata->end(), "parameter '", name, "' not found in sparse metadata");
    const auto mine = grad.coalesce();
    const auto ids = found->second.to(mine.device(), at::kLong);
    auto shape = mine.values().sizes().vec();
    shape[0] = ids.numel();
    auto rows = at::zeros(shape, mine.values().options());
    rows.index_copy_(0, at::searchsorted(ids, mine.indices()[0]), mine.values());
    result = {at::sparse_coo_tensor(ids.unsqueeze(0), rows, mine.sizes()), ids};
  }
  if (scale != 1.0) transport::scale_by(result.gradient._values(), scale);
  return result;
}

void PackRules::copied(int64_t param, at::Tensor& grad, bool unused) const {
  warn_create_graph(grad);
  const auto& place = layout.place(param);
  const bool at_once = !context.has_own_storage() || packed.are_left_to_optimizer();
  const bool in_place =
      at_once && !unused && layout.gives_views(*place.bucket) && !grad.requires_grad() && context.rpc == nullptr;
  if (in_place) {
    place.slot->restore_view();
    grad = place.slot->view();
  }
  if (!unused) packed.note(param, grad, in_place);
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
