// Sparse gradients: one bucket each, reduced as they are or on an agreed set of row ids.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>

namespace torchddp::reducer {

// Row ids that every rank announced before the step (torch's `_set_sparse_metadata`), by parameter name. With them only the
// values are sent: all ranks hold rows for the same ids, so the values are dense and have the same shape.
using SparseMetadata = std::map<std::string, at::Tensor>;

// The gradient of an unused parameter. It has the dimensions that gradients of embeddings have, because gloo aborts the process
// if they differ between ranks.
at::Tensor no_rows(const at::Tensor& param);

struct SparseGrad {
  at::Tensor gradient;
  std::optional<at::Tensor> row_ids;  // only with metadata
};

// The gradient of parameter `name`, times `scale`, in the form it is reduced in. In place if there is no metadata.
SparseGrad make_sparse_grad(const at::Tensor& grad, double scale, const std::string& name,
                            const std::optional<SparseMetadata>& metadata);

}  // namespace torchddp::reducer
