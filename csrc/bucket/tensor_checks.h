// Tensors prepared for the kernels that check memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchddp::bucket {

// The number of infinite or NaN elements (for complex tensors, of parts) in any strided tensor; at memory speed on the CPU.
// Waits for a device.
int64_t count_non_finite(const at::Tensor& tensor);

// Of a contiguous floating point tensor on the CPU. Squares are formed and added in double in a fixed order, so the bits do not
// depend on the instruction set or the number of threads.
double sum_of_squares(const at::Tensor& tensor);

// Of the bits of a contiguous CPU tensor, of any dtype; see kernels/hash.h.
int64_t hash_tensor(const at::Tensor& tensor);

}  // namespace torchddp::bucket
