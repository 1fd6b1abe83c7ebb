// Sparse gradients: a bucket each, reduced as they are or on an agreed set of row ids.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>

#include "bucket/bucket.h"
#include "transport/transport.h"

namespace torchddp::reducer {

// Row ids that every rank announced before the step (torch's `_set_sparse_metadata`), by parameter name. With them only the
// values travel: ranks hold rows for the same ids, so the values are dense memory of equal shape.
using SparseMetadata = std::map<std::string, at::Tensor>;

// The gradient of a parameter that was not used. Of the dimensions that gradients of embeddings have, as the ranks' must match: gloo ends
// the process where they don't.
at::Tensor no_rows(const at::Tensor& param);

class SparseGrad {
 public:
  // Takes a parameter's sparse gradient into its bucket, scaled. Returns what `param.grad` should become.
  at::Tensor take(bucket::Bucket& bucket, const at::Tensor& grad, double scale, const std::string& name,
                  const SparseMetadata* metadata);
  void start(bucket::Bucket& bucket, transport::Transport& transport);
  // After the wait: writes the sum into the gradient that take() returned. `result` replaces it if a communication hook ran.
  void finish(bucket::Bucket& bucket, const std::optional<at::Tensor>& result);
  const std::optional<at::Tensor>& row_ids() const { return row_ids_; }

 private:
  std::optional<at::Tensor> row_ids_;
  at::Tensor rows_;  // [number of ids, ...] dense values, only with metadata
};

}  // namespace torchddp::reducer
