// Finds infinities and NaNs in gradients while the data is in cache anyway.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace torchddp::kernels {

// The number of infinite or NaN values among `numel` contiguous elements at any alignment. Without any it costs one exponent
// test per element. Opaque types have none.
int64_t count_non_finite(const void* data, DType dtype, int64_t numel);

// scale_cast (pack.h), and count_non_finite of `src` beforehand, in a single pass over memory.
int64_t scale_cast_counting(void* dst, DType dst_type, const void* src, DType src_type, int64_t numel, double scale);

}  // namespace torchddp::kernels
