// Tensors as the kernels that check memory see them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchddp::bucket {

// Elements that are infinite or NaN (of complex ones, parts); for any strided tensor, on the CPU at the speed of memory. Waits for a
// device.
int64_t count_non_finite(const at::Tensor& tensor);

// Of a contiguous floating point tensor on the CPU. Squares are formed and added in double, in a fixed order: the same bits whatever
// the instruction set and the number of threads.
double sum_of_squares(const at::Tensor& tensor);

// Of the bits of a contiguous CPU tensor, of any dtype; see kernels/hash.h.
int64_t hash_tensor(const at::Tensor& tensor);

}  // namespace torchddp::bucket
