// Chooses the transport of a process group.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>

#include "transport/transport.h"

namespace torchddp::transport {

// `choice`: "auto" or "c10d". Throws std::invalid_argument for anything else.
std::shared_ptr<Transport> open_transport(const std::string& choice, c10::intrusive_ptr<c10d::ProcessGroup> group);

}  // namespace torchddp::transport
