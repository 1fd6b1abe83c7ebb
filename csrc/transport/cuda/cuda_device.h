// The real device and the real NCCL behind the tables of gpu/.
#pragma once

#include <memory>
#include <string>

#include "gpu/device.h"
#include "gpu/nccl.h"

namespace torchddp::transport {

// CUDA device `index`; one object each, kept for ever. Null if this extension was compiled without CUDA, as are the others here.
std::shared_ptr<gpu::Device> cuda_device(int index);

// Calls are made for CUDA device `index`.
std::shared_ptr<gpu::Nccl> nccl_library(int index);

// Tells devices of this and other machines apart; empty without CUDA. Throws gpu::DeviceError.
std::string device_identity(int index);

}  // namespace torchddp::transport
