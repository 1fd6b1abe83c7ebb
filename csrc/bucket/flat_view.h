// Tensors in flat memory that know nothing of each other.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchddp::bucket {

// Shape and strides of `like`, which must be dense, in the memory of `flat` (1-d) from element `offset` on. It has a storage of its
// own, so that saving or copying it does not drag the rest of `flat` along; it keeps that memory alive.
at::Tensor make_flat_view(const at::Tensor& flat, int64_t offset, const at::Tensor& like);

}  // namespace torchddp::bucket
