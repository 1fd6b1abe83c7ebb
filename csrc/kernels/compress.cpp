// The layout of scales and codes, and calls to the kernels of the active instruction set.
#include "kernels/compress.h"

#include "common/round_up.h"
#include "kernels/kernel_table.h"

namespace torchddp::kernels {
namespace {

bool has_blocks(Format format) { return format != Format::kFp16 && format != Format::kBf16; }

int64_t scale_bytes(Format format, int64_t numel) {
  return has_blocks(format) ? ceil_div(numel, block_numel(format)) * static_cast<int64_t>(sizeof(float)) : 0;
}

}  // namespace

std::optional<Format> find_format(std::string_view name) {
  for (size_t i = 0; i < kFormatNames.size(); ++i) {
    if (kFormatNames[i] == name) return static_cast<Format>(i);
  }
  return std::nullopt;
}

int64_t compressed_bytes(Format format, int64_t numel) {
  return scale_bytes(format, numel) + ceil_div(numel * code_bits(format), 8);
}

void compress(Format format, const float* source, int64_t numel, unsigned char* out, float* residual, float scale) {
  const auto& kernels = active_table().compress[static_cast<size_t>(format)];
  kernels[residual != nullptr](out, out + scale_bytes(format, numel), source, residual, numel, scale);
}

void decompress(Format format, const unsigned char* data, float* out, int64_t numel, bool accumulate) {
  const auto& kernels = active_table().decompress[static_cast<size_t>(format)];
  kernels[accumulate](data, data + scale_bytes(format, numel), out, numel);
}

}  // namespace torchddp::kernels
