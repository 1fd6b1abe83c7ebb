#include "bucket/flat_view.h"

#include <ATen/ops/from_blob.h>

#include "common/check.h"

namespace torchddp::bucket {

at::Tensor make_flat_view(const at::Tensor& flat, int64_t offset, const at::Tensor& like) {
  TDDP_CHECK(flat.is_contiguous() && flat.scalar_type() == like.scalar_type() && offset >= 0 &&
                 offset + like.numel() <= flat.numel(),
             "a tensor of ", like.numel(), " elements of ", like.scalar_type(), " does not fit at element ", offset,
             " of ", flat.numel(), " of ", flat.scalar_type());
  TDDP_CHECK(like.is_non_overlapping_and_dense(), "a tensor with strides ", like.strides(), " for shape ", like.sizes(),
             " has no dense memory");
  auto* const data = static_cast<std::byte*>(flat.mutable_data_ptr()) + offset * static_cast<int64_t>(flat.itemsize());
  return at::from_blob(data, like.sizes(), like.strides(), 0, [flat](void*) {}, flat.options(), flat.device());
}

}  // namespace torchddp::bucket
