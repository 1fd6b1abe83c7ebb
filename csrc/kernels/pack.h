// Pack and unpack on the CPU: gather, scale and cast in one pass over memory.
//
// Free of torch headers, so that the bodies are tested alone, under ASan and UBSan. Instruction sets are chosen at run
// time (one portable binary): see pack_cpu.cpp.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace torchddp::kernels {

// dst[i] = cast<dst_type>(src[i] * scale), i in [0, numel); both contiguous. The product is formed in double for kF64
// and in float otherwise, and rounded once, to nearest even: bit for bit what torch's `mul` by a scalar gives. (kF64 to
// a 16-bit type goes by way of float, as torch's cast does.) A NaN stays a NaN; its payload is kept as far as it fits.
// scale == 1 with equal types is a plain copy, and dst == src (in place) is allowed when the types are equal; any other
// overlap is not. Opaque types need dst_type == src_type and scale == 1: anything else throws std::invalid_argument.
void scale_cast(void* dst, DType dst_type, const void* src, DType src_type, int64_t numel, double scale);

// The number of infinite or NaN values among `numel` contiguous elements at any alignment. Without any it costs one exponent
// test per element. Opaque types have none.
int64_t count_non_finite(const void* data, DType dtype, int64_t numel);

// scale_cast, and count_non_finite of `src` beforehand, in a single pass over memory.
int64_t scale_cast_counting(void* dst, DType dst_type, const void* src, DType src_type, int64_t numel, double scale);

// Name of the instruction set in use: "avx512", "avx2" or "generic". TORCHDDP_CPU_CAPABILITY=generic|avx2|avx512 in the
// environment lowers it (read once, at first use; never raises it above what the processor has).
const char* cpu_capability();

}  // namespace torchddp::kernels
