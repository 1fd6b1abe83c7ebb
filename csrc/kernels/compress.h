// Numbers in fewer bits: blockwise quantization with error feedback, on the CPU, in one pass over memory.
//
// Free of torch headers, like pack.h, and with the same choice of the instruction set at run time. Every instruction set
// gives the same bits (but for the payload of a NaN in kFp16 and kBf16).
//
// Note [Compressed formats]
// `numel` floats are split into blocks, the last of which may be shorter. What is sent is one float per block (none for
// kFp16 and kBf16), then the codes, the last block's padded to whole bytes as if zeros followed.
//   kInt8  256 a block: scale = max|v| / 127, code = round(v * (127 / max|v|)), value = code * scale. (Dettmers 2015,
//          8-bit approximations for parallelism; the blocks are those of Dettmers et al. 2021.)
//   kInt4  64 a block: 7 in place of 127; code + 8 in a nibble, the first of a pair in the low one.
//   kFp16, kBf16  casts, to nearest even.
// A block so close to zero that 127 / max|v| is infinite counts as zeros. Where scale * 127 would be infinite although
// max|v| is not, the scale is the next smaller number.
// A block with an infinity or a NaN gets a NaN as its scale, so that all its values are NaN: a broken gradient stays
// visible. Its residual becomes zero: error feedback is not poisoned. So does that of a value which kFp16 or kBf16
// can't hold, or which is not finite.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace torchddp::kernels {

enum class Format : uint8_t { kInt8, kInt4, kFp16, kBf16 };

// In the order of Format.
inline constexpr std::array<std::string_view, 4> kFormatNames = {"int8", "int4", "fp16", "bf16"};
std::optional<Format> find_format(std::string_view name);

// Of the formats with blocks.
constexpr int64_t block_numel(Format format) { return format == Format::kInt8 ? 256 : 64; }

constexpr int64_t code_bits(Format format) { return format == Format::kInt8 ? 8 : format == Format::kInt4 ? 4 : 16; }

// Scales and codes of `numel` >= 0 floats; at most 2^58 of them.
int64_t compressed_bytes(Format format, int64_t numel);

// out = encode(v) with v = source * scale + residual, and residual = v - decode(encode(v)); without a residual (null) only
// out = encode(source * scale). The product is rounded before the sum. `source` and `residual` hold `numel` floats, `out`
// compressed_bytes(format, numel), all at any alignment, none overlapping another.
void compress(Format format, const float* source, int64_t numel, unsigned char* out, float* residual, float scale);

// out = decode(data), or out += decode(data) where `accumulate`. No overlap.
void decompress(Format format, const unsigned char* data, float* out, int64_t numel, bool accumulate);

}  // namespace torchddp::kernels
