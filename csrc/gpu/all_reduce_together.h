// Sums of several tensors as one operation of NCCL.
#pragma once

#include <span>

#include "gpu/nccl.h"

namespace torchddp::gpu {

struct Memory {
  void* data;
  int64_t numel;
};

// In place: the sum of `packed`, which may be empty, and of each of the others times `scale`, rounded to `type`. NCCL scales while it
// reads, which costs next to nothing; but its NVLink SHARP and symmetric-memory algorithms know plain sums only. Which kind of sum it
// is must not depend on the scale, in which ranks may differ: NCCL could choose another algorithm for it. Without peers (`size` 1) it
// may.
int all_reduce_together(Nccl& nccl, Comm comm, Stream stream, kernels::DType type, const Memory& packed,
                        std::span<const Memory> others, double scale, int size);

// Whether NCCL may multiply values of `type` by `scale`, which it rounds to that type. (torch forms the product in float.)
bool can_scale_by(kernels::DType type, double scale);

}  // namespace torchddp::gpu
