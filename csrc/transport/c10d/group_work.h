// Waiting for an operation of torch's process groups so that another thread can end the wait.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "transport/interruption.h"

namespace torchddp::transport {

// Whether the group's operations on CPU tensors are gloo's: torch can't abort them, and their futures complete by themselves.
bool is_gloo(c10d::ProcessGroup& group);

// As work.wait(timeout), for an operation of gloo; throws TransportError when `interruption` is raised.
bool wait_interruptibly(c10d::Work& work, const Interruption& interruption,
                        std::chrono::milliseconds timeout = kNoTimeout);

}  // namespace torchddp::transport
