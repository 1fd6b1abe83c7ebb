// All ranks must reduce the same buckets in the same order: rank 0's plan wins.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "plan/bucket_plan.h"
#include "transport/transport.h"

namespace torchddp::reducer {

// Collective. `device` is where the group's collectives work (a NCCL group takes no CPU tensors).
plan::BucketPlan agree_on_plan(const plan::BucketPlan& mine, std::span<const plan::ParamSpec> params,
                               const plan::BucketLimits& limits, transport::Transport& transport, at::Device device,
                               std::chrono::milliseconds timeout);

}  // namespace torchddp::reducer
