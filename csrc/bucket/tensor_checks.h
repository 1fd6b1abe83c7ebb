// Tensors as the kernels that check memory see them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchddp::bucket {

// Elements that are infinite or NaN (of complex ones, parts); for any strided tensor, on the CPU at the speed of memory. Waits for a
// device.
int64_t count_non_finite(const at::Tensor& tensor);

// Of a contiguous floating point tensor on the CPU. Squares are formed and added in double, in a fixed order: the same bits whatever
// the instruction set and the number of threads.
double sum_of_squares(const at::Tensor& tensor);

// Of each tensor a hash of its bits in logical order: 0.0 and -0.0 differ, equal NaNs don't. Tensors are strided, of any dtype.
// CPU tensors: kernels::Hash. Others, and all if `by_operators`: another hash, by torch's operators, in parts (128 MiB of memory), and
// one wait for each device.
std::vector<int64_t> hash_tensors(const std::vector<at::Tensor>& tensors, bool by_operators);

}  // namespace torchddp::bucket
