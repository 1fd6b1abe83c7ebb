// Pack and unpack on a CUDA device: one launch moves a whole bucket. Uses no CUDA types: a stream is a void* (cudaStream_t), an
// error an int (cudaError_t, 0 is success). Defined in pack_cuda.cu, so only in CUDA builds.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace torchddp::kernels {

// A tensor: its contiguous memory, and its offset in flat memory, in elements.
struct DevicePiece {
  void* outside;
  int64_t begin;
  int64_t numel;
};

enum class Direction : uint8_t { kPack, kUnpack };

// kPack: flat[begin + i] = cast<flat_type>(outside[i] * scale) for every piece; scale_cast (pack.h) says how. kUnpack is the
// way back: outside[i] = cast<outside_type>(flat[begin + i] * scale). Asynchronous on `stream` of the current device, and fit
// for stream capture: pointers and sizes travel in the kernel's parameters. Pieces may come in any order and have no elements;
// none at all is fine. From kMaxPieces (pack_device_plan.h) non-empty pieces on, it takes more than one launch.
//
// All pointers are the device's and aligned to their element size; 16-byte accesses need no more than that, but source and
// destination equally far from a 16-byte boundary (counted in elements) are fastest. A piece may lie in place
// (outside == flat + begin, equal types); any other overlap is not allowed, nor between pieces.
//
// Unlike on the CPU, a NaN that is scaled or cast becomes the device's own NaN: its payload is lost, as in torch there.
//
// Returns cudaErrorInvalidValue, before anything is launched, for a negative numel or begin, a null or unaligned pointer, and
// for opaque types that are to be scaled or cast. The caller makes the device of the pointers current.
int move_on_device(Direction direction, void* flat, DType flat_type, const DevicePiece* pieces, int64_t count,
                   DType outside_type, double scale, void* stream);

// 0 if the current device and driver can run these kernels, otherwise CUDA's error: they are built for some compute
// capabilities only. Loads one with the most parameters, so the first call must not happen while a graph is being captured.
int find_kernels();

}  // namespace torchddp::kernels
