// Infinities and NaNs in gradients, found while the data is in cache anyway.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace torchddp::kernels {

// How many of `numel` contiguous elements, at any alignment, are infinite or NaN. Where there are none it costs an exponent test an
// element. Opaque types have none.
int64_t count_non_finite(const void* data, DType dtype, int64_t numel);

// scale_cast (pack.h), and what count_non_finite says of `src` before it, in one pass over memory.
int64_t scale_cast_counting(void* dst, DType dst_type, const void* src, DType src_type, int64_t numel, double scale);

}  // namespace torchddp::kernels
