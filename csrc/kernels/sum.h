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
// way a range is split into calls. One source is copied.
//
// With `scales`, for sums of kF64 and kF32 alone, src[r][i] * scales[r] are summed: products are rounded before they are added,
// as if each source had been scaled by itself (kernels::scale_cast) beforehand.
//
// With `counts`, for sums of floats (and finite scales) alone, counts[r] grows by how many elements of srcs[r] are infinite or
// NaN, as they were before the sum was written over them. Returns whether any element of the sum is, which may come from finite
// ones; always false without `counts`. Where everything is finite it costs a test of the sum, in registers.
//
// Throws std::invalid_argument if there are no sources, or for anything else than that.
bool reduce_ranks(std::span<void* const> dsts, std::span<const void* const> srcs, DType type, ReduceOp op,
                  int64_t numel, std::span<const double> scales = {}, std::span<int64_t> counts = {});

// Whether sums of this type can be scaled.
bool can_scale(DType type);

}  // namespace torchddp::kernels
