#include "reducer/sparse_grad.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include "common/check.h"

namespace torchddp::reducer {

at::Tensor no_rows(const at::Tensor& param) {
  return at::_sparse_coo_tensor_with_dims(1, param.dim() - 1, param.sizes(), param.options().layout(at::kSparse));
}

at::Tensor SparseGrad::take(bucket::Bucket& bucket, const at::Tensor& grad, double scale, const std::string& name,
                            const SparseMetadata* metadata) {
  c10::NoGradGuard no_grad;
  TDDP_CHECK(grad.defined(), "Expected sparse gradient to be defined: parameter '", name, "' got none");
  TDDP_CHECK(grad.layout() == at::kSparse, "Expected variable to have sparse gradient: parameter '", name,
             "' got a dense one; was its embedding made with sparse=False after wrapping?");
  auto mine = grad;
  row_ids_.reset();
  if (metadata != nullptr) {
    const auto found = metadata->find(name);
    TDDP_CHECK(found != metadata->end(), "parameter '", name, "' not found in sparse metadata");
    mine = grad.coalesce();
    row_ids_ = found->second.to(mine.device(), at::kLong);
    const auto positions = at::searchsorted(*row_ids_, mine.indices()[0]);
    auto shape = mine.values().sizes().vec();
    shape[0] = row_ids_->numel();
    rows_ = at::zeros(shape, mine.values().options());
    rows_.index_copy_(0, positions, mine.values());
    mine = at::sparse_coo_tensor(row_ids_->unsqueeze(0), rows_, mine.sizes());
  }
  if (scale != 1.0) {
    mine.mul_(scale);
  }
  bucket.set_sparse_gradient(mine);
  return mine;
}

void SparseGrad::start(bucket::Bucket& bucket, transport::Transport& transport) {
  if (row_ids_) {
    rows_ = bucket.buffer()._values();
    transport.all_reduce(rows_, bucket.work());
    return;
  }
  transport.all_reduce(bucket.wire(), bucket.work());
}

void SparseGrad::finish(bucket::Bucket& bucket, const std::optional<at::Tensor>& result) {
  c10::NoGradGuard no_grad;
  if (result && !result->is_same(bucket.buffer())) {
    auto target = bucket.buffer();
    target.copy_(*result);
  }
}

}  // namespace torchddp::reducer
