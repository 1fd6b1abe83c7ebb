// The real GPU and the real NCCL behind the interfaces of gpu/. Everything that is only there in a build with CUDA lies in this
// folder.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <span>
#include <string>

#include "gpu/device.h"
#include "gpu/nccl.h"
#include "kernels/pack_cuda.h"

struct CUstream_st;  // cudaStream_t points at one

namespace torchddp::transport {

bool is_gpu(at::Device device);
at::Device gpu_at(int index);
inline CUstream_st* stream_of(gpu::Stream stream) { return static_cast<CUstream_st*>(stream); }

// One object for each GPU, never destroyed. Null for other devices, and in a build without CUDA.
std::shared_ptr<gpu::Device> device_of(at::Device device);

// Makes calls for GPU `index`. Null in a build without CUDA.
std::shared_ptr<gpu::Nccl> nccl_library(int index);

// Identifies a GPU among all machines; empty without CUDA. Throws gpu::DeviceError.
std::string device_identity(int index);

// kernels::move_on_device on the current stream of `device`. False if nothing was moved, because this build has no kernels that
// run there; it warns once.
bool move_by_kernels(kernels::Direction direction, void* flat, kernels::DType flat_type,
                     std::span<const kernels::DevicePiece> pieces, kernels::DType outside_type, double scale,
                     at::Device device);

}  // namespace torchddp::transport
