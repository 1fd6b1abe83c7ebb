// Waiting for an operation of torch's process groups so that another thread can end the wait.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "common/signals.h"
#include "transport/interruption.h"

namespace torchddp::transport {

// Whether the group's operations on CPU tensors are gloo's: torch can't abort them, and their futures complete by themselves.
bool is_gloo(c10d::ProcessGroup& group);

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Runs `wait`, for an operation of `group`, or of none. If the handler of a signal ends it, the group stays for good: gloo's destructor waits until
// its operations have ended, which would hold up the end of the process for as long.
template <typename Wait>
auto wait_or_keep(const GroupPtr& group, Wait&& wait) {
  try {
    return wait();
  } catch (const SignalInterrupt&) {
    static_cast<void>(GroupPtr(group).release());
    throw;
  }
}

// As work.wait(timeout), for an operation of gloo, which `group` is; throws TransportError when `interruption` is raised.
bool wait_interruptibly(c10d::Work& work, const GroupPtr& group, const Interruption& interruption,
                        std::chrono::milliseconds timeout = kNoTimeout);

// How long an operation of the group may take.
std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group, at::Device device);

}  // namespace torchddp::transport
