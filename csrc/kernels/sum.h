// Reductions over the buffers of several ranks on the CPU, in one pass over memory.
//
// Free of torch headers, like pack.h, and with the same choice of the instruction set at run time.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/dtype.h"

namespace torchddp::kernels {

enum class ReduceOp : uint8_t { kSum, kMin, kMax };

// dst[k][i] = src[0][i] + src[1][i] + ... (or min, max), in this order, for every k, i in [0, numel). All buffers are
// contiguous, at any alignment. A destination may be one of the sources (same pointer); any other overlap is not
// allowed. 16-bit floats are reduced in float and rounded once, to nearest even; the others are reduced in their own
// type, and integers wrap. The minimum or maximum with a NaN is NaN, as in torch; of -0 and +0 it is the later source's.
//
// The result is the same, bit for bit but for the payload of NaN, whatever the instruction set, the alignment and the
// way a range is split into calls. One source is copied. Throws std::invalid_argument if there are no sources.
void reduce_ranks(std::span<void* const> dsts, std::span<const void* const> srcs, DType type, ReduceOp op,
                  int64_t numel);

// The same sum of src[r][i] * scales[r]: products are rounded before they are added, as if each source had been scaled by
// itself (kernels::scale_cast) beforehand. kF64 and kF32 only, anything else throws std::invalid_argument.
bool can_scale(DType type);
void scaled_sum_ranks(std::span<void* const> dsts, std::span<const void* const> srcs, std::span<const double> scales,
                      DType type, int64_t numel);

// The sum as above, bit for bit: reduce_ranks with kSum, or scaled_sum_ranks if there are scales. counts[r] grows by how many
// elements of srcs[r] are infinite or NaN, as they were before the sum was written over them. Returns whether any element of
// the sum is, which may come from finite ones. Floats only (and finite scales), anything else throws std::invalid_argument.
// Where everything is finite it costs a test of the sum, in registers.
bool checked_sum_ranks(std::span<void* const> dsts, std::span<const void* const> srcs, std::span<const double> scales,
                       DType type, int64_t numel, std::span<int64_t> counts);

}  // namespace torchddp::kernels
