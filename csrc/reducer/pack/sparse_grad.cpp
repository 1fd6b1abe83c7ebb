#include "reducer/pack/sparse_grad.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include "common/check.h"

namespace torchddp::reducer {

at::Tensor no_rows(const at::Tensor& param) {
  return at::_sparse_coo_tensor_with_dims(1, param.dim() - 1, param.sizes(), param.options().layout(at::kSparse));
}

SparseGrad make_sparse_grad(const at::Tensor& grad, double scale, const std::string& name,
                            const std::optional<SparseMetadata>& metadata) {
  c10::NoGradGuard no_grad;
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
  if (scale != 1.0) {
    result.gradient.mul_(scale);
  }
  return result;
}

}  // namespace torchddp::reducer
