// What a stream of gpu/ is to the CUDA runtime.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/device.h"

namespace torchddp::transport {

inline cudaStream_t stream_of(gpu::Stream stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace torchddp::transport
