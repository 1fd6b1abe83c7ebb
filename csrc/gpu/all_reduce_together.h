// Sums several tensors in one NCCL operation.
#pragma once

#include <span>

#include "gpu/nccl.h"

namespace torchddp::gpu {

struct Memory {
  void* data;
  int64_t numel;
};

// In place: the sum of `packed`, which may be empty, and of each other tensor times `scale`, rounded to `type`. NCCL scales
// while it reads, which costs almost nothing, but its NVLink SHARP algorithms support plain sums only. The
// kind of sum must not depend on the scale, in which ranks may differ, because NCCL could then choose different algorithms.
// Without peers (`size` 1) it may.
int all_reduce_together(Nccl& nccl, Comm comm, Stream stream, kernels::DType type, const Memory& packed,
                        std::span<const Memory> in_place, double scale, int size);

// Whether NCCL may multiply values of `type` by `scale`, which it rounds to that type. (torch forms the product in float.)
bool can_scale_by(kernels::DType type, double scale);

}  // namespace torchddp::gpu
