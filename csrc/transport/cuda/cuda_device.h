// The real device and the real NCCL behind the interfaces of gpu/.
#pragma once

#include <memory>
#include <string>

#include "gpu/device.h"
#include "gpu/nccl.h"

namespace torchddp::transport {

// CUDA device `index`; one object each, never destroyed. Null in a build without CUDA, like everything here.
std::shared_ptr<gpu::Device> cuda_device(int index);

// Makes calls for CUDA device `index`.
std::shared_ptr<gpu::Nccl> nccl_library(int index);

// Identifies a device among all machines; empty without CUDA. Throws gpu::DeviceError.
std::string device_identity(int index);

}  // namespace torchddp::transport
