// The device's pack kernels (kernels/pack_cuda.h) on tensors, with all that a caller can get wrong checked.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace torchddp::bucket {

// flat[offsets[k] + i] = tensors[k][i] * scale, cast to flat's type, for all tensors in one launch (more from some 1,100 tensors on).
// Asynchronous, on the current stream of flat's device. Tensors are contiguous, on that device, of one dtype; offsets count
// elements of `flat`. Integers and bool are copied only: scale 1, equal dtypes. A tensor may be a view of `flat` at its
// offset; any other overlap is not allowed.
//
// `stats`, two float64 elements on the device, gets the sum of squares of what was written and the number of its non-finite
// elements (a complex number counts as two).
//
// A condition that does not hold is a RuntimeError in Python, before anything is launched; so is a build without CUDA.
void pack_on_device(const at::Tensor& flat, const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& offsets,
                    double scale, const std::optional<at::Tensor>& stats);

// The way back: tensors[k][i] = flat[offsets[k] + i] * scale.
void unpack_on_device(const at::Tensor& flat, const std::vector<at::Tensor>& tensors,
                      const std::vector<int64_t>& offsets, double scale, const std::optional<at::Tensor>& stats);

}  // namespace torchddp::bucket
