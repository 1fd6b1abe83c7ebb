// kernels::move_on_device with torch's operators, for devices that our kernels were not built for.
#pragma once

#include <span>

#include "bucket/grad_slot.h"
#include "kernels/pack_cuda.h"

namespace torchddp::bucket {

// Gives the same bits, on the current stream, for all pieces at once. `slot`: any slot of the bucket.
void move_by_operators(kernels::Direction direction, const GradSlot& slot, std::span<const kernels::DevicePiece> pieces,
                       kernels::DType outside_type, double scale);

}  // namespace torchddp::bucket
