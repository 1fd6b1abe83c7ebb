// Sparse gradients: a bucket each, reduced as they are or on an agreed set of row ids.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>

namespace torchddp::reducer {

// Row ids that every rank announced before the step (torch's `_set_sparse_metadata`), by parameter name. With them only the
// values travel: ranks hold rows for the same ids, so the values are dense memory of equal shape.
using SparseMetadata = std::map<std::string, at::Tensor>;

// The gradient of a parameter that was not used. Of the dimensions that gradients of embeddings have, as the ranks' must match: gloo ends
// the process where they don't.
at::Tensor no_rows(const at::Tensor& param);

struct SparseGrad {
  at::Tensor gradient;
  std::optional<at::Tensor> row_ids;  // only with metadata
};

// The gradient of parameter `name`, times `scale`, as it is reduced. In place where there is no metadata.
SparseGrad make_sparse_grad(const at::Tensor& grad, double scale, const std::string& name,
                            const std::optional<SparseMetadata>& metadata);

}  // namespace torchddp::reducer
