// Statistics of gradients, for loss scaling and gradient clipping.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace torchddp::kernels {

struct GradStats {
  // Squares of the values as they stand in memory (after scaling and rounding), formed and added in double: exact squares,
  // except of kF64. An infinity or NaN makes the sum one too, as it does a norm in torch.
  double sum_squares = 0;
  int64_t non_finite = 0;  // infinities and NaNs

  void merge(const GradStats& other) {
    sum_squares += other.sum_squares;
    non_finite += other.non_finite;
  }
};

// The statistics of `numel` contiguous elements, at any alignment. The same bits on every instruction set (but for the
// payload of a NaN), because the order of additions is fixed. Opaque types throw std::invalid_argument.
GradStats measure(const void* data, DType dtype, int64_t numel);

}  // namespace torchddp::kernels
