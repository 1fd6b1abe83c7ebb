// Inside of the compression kernels: one table per instruction set, reached through its KernelTable. Not for use outside
// kernels/ and its tests.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/compress.h"

namespace torchddp::kernels {

inline constexpr int kNumFormats = static_cast<int>(kFormatNames.size());

// Of the formats with blocks.
constexpr int64_t block_numel(Format format) {
  return format == Format::kInt8 ? 256 : format == Format::kInt4 ? 64 : 1024;
}

constexpr int64_t code_bits(Format format) {
  return format == Format::kInt8 ? 8 : format == Format::kInt4 ? 4 : format == Format::kSign ? 1 : 16;
}

// Sums of |v| that are carried side by side for the mean of a kSign block, whatever the width of a vector.
inline constexpr int64_t kSignLanes = 32;

// The format and the instruction set fixed; scales and codes are the two parts of the compressed bytes. kFp16 and kBf16
// have no scales.
using CompressFn = void (*)(unsigned char* scales, unsigned char* codes, const float* source, float* residual,
                            int64_t numel, float scale);
using DecompressFn = void (*)(const unsigned char* scales, const unsigned char* codes, float* out, int64_t numel);

struct CompressTable {
  std::array<std::array<CompressFn, 2>, kNumFormats> compress;      // [format][has residual]
  std::array<std::array<DecompressFn, 2>, kNumFormats> decompress;  // [format][accumulates]
};

extern const CompressTable generic_compress;
// On x86-64 only.
extern const CompressTable avx2_compress;
extern const CompressTable avx512_compress;

}  // namespace torchddp::kernels
