// Compression: every format, instruction set, size and alignment against scalar loops.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "capabilities.h"
#include "check.h"
#include "kernels/compress.h"
#include "kernels/kernel_table.h"
#include "pack_reference.h"

namespace torchddp::kernels {
namespace {

using reference::Bytes;
using reference::Floats;
using reference::kInfinity;
using reference::kNan;
using reference::same_bits;

constexpr Format kFormats[] = {Format::kInt8, Format::kInt4, Format::kFp16, Format::kBf16};
constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kTiny = std::numeric_limits<float>::denorm_min();

// Sizes around vectors, units of vectors and blocks of each format.
constexpr int64_t kSizes[] = {0,   1,   2,   3,   5,   8,   9,   15,  16,   17,   31,   33,   63,   64,   65,
                              127, 128, 200, 255, 256, 257, 511, 513, 1023, 1024, 1025, 1100, 2048, 2049, 3333};

struct Compressed {
  Bytes bytes;
  Floats residual;
};

int64_t reference_block(Format format) { return format == Format::kInt8 ? 256 : 64; }

bool has_blocks(Format format) { return format != Format::kFp16 && format != Format::kBf16; }

// One block: its scale, codes and decoded values.
struct Block {
  float scale = 0;
  std::vector<int> codes;
  Floats decoded;
};

Block reference_block_of(Format format, const float* values, int64_t numel) {
  Block block;
  const int most = format == Format::kInt8 ? 127 : 7;
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < numel; ++i) {
    finite &= std::isfinite(values[i]);
    largest = std::max(largest, std::fabs(values[i]));
  }
  const float inverse = static_cast<float>(most) / largest;
  if (!finite) {
    block.scale = kNan;
  } else if (!std::isinf(inverse)) {
    block.scale = largest / static_cast<float>(most);
    if (std::isinf(block.scale * static_cast<float>(most))) block.scale = std::nextafter(block.scale, 0.0f);
  }
  for (int64_t i = 0; i < numel; ++i) {
    int code = 0;
    if (finite && block.scale > 0) {
      code = std::clamp(static_cast<int>(std::nearbyint(values[i] * inverse)), -most, most);
    }
    block.decoded.push_back(static_cast<float>(code) * block.scale);
    block.codes.push_back(code);
  }
  return block;
}

void append_codes(Bytes& bytes, Format format, std::vector<int> codes) {
  if (format == Format::kInt8) {
    for (const int code : codes) bytes.push_back(static_cast<unsigned char>(code));
  } else {
    if (codes.size() % 2 == 1) codes.push_back(0);
    for (size_t i = 0; i < codes.size(); i += 2) {
      bytes.push_back(static_cast<unsigned char>((codes[i] + 8) | (codes[i + 1] + 8) << 4));
    }
  }
}

Compressed reference_halves(Format format, const Floats& values) {
  const DType type = format == Format::kFp16 ? DType::kF16 : DType::kBF16;
  Compressed result{Bytes(values.size() * 2), {}};
  for (size_t i = 0; i < values.size(); ++i) {
    reference::set(result.bytes.data(), type, static_cast<int64_t>(i), values[i]);
    const float error =
        values[i] - static_cast<float>(reference::get(result.bytes.data(), type, static_cast<int64_t>(i)));
    result.residual.push_back(std::isfinite(error) ? error : 0.0f);
  }
  return result;
}

// The expected output of `compress` for v = values.
Compressed reference_compress(Format format, const Floats& values) {
  if (!has_blocks(format)) return reference_halves(format, values);
  Compressed result;
  Bytes codes;
  const auto numel = static_cast<int64_t>(values.size());
  for (int64_t begin = 0; begin < numel; begin += reference_block(format)) {
    const float* first = values.data() + begin;
    const Block block = reference_block_of(format, first, std::min(reference_block(format), numel - begin));
    unsigned char scale[4];
    std::memcpy(scale, &block.scale, 4);
    result.bytes.insert(result.bytes.end(), scale, scale + 4);
    append_codes(codes, format, block.codes);
    for (size_t i = 0; i < block.decoded.size(); ++i) {
      result.residual.push_back(std::isfinite(block.scale) ? first[i] - block.decoded[i] : 0.0f);
    }
  }
  result.bytes.insert(result.bytes.end(), codes.begin(), codes.end());
  return result;
}

// Values of many magnitudes with the hard cases: ties, zeros of both signs, denormals, the largest numbers.
Floats make_values(int64_t numel, uint32_t seed) {
  std::mt19937 random(seed);
  constexpr float kHard[] = {0.0f, -0.0f, 1.0f, -1.0f, 0.5f, kTiny, -kTiny, 1e-39f, 3e-37f, 4e-37f};
  Floats values(static_cast<size_t>(numel));
  const int kind = static_cast<int>(seed % 6);
  for (float& value : values) {
    const int exponent = kind == 0 ? -3 : kind == 1 ? static_cast<int>(random() % 60) - 30 : kind == 2 ? -130 : 0;
    value = std::ldexp(static_cast<float>(static_cast<int32_t>(random())), exponent - 31);
    if (kind == 3 && random() % 4 != 0) value = kHard[random() % std::size(kHard)];
    if (kind == 4) value = static_cast<float>(static_cast<int>(random() % 255) - 127) / 2;  // ties if the scale is 1
    if (kind == 5) value *= kMax;
  }
  if (kind == 4 && !values.empty()) values[0] = 127;
  if (kind == 5 && !values.empty()) values[0] = kMax;
  return values;
}

// `compress` of arrays that start at odd addresses, followed by bytes that must not change.
Compressed run_compress(Format format, const Floats& source, const Floats* residual, float scale, size_t shift) {
  const size_t bytes = source.size() * sizeof(float);
  const auto out_bytes = static_cast<size_t>(compressed_bytes(format, static_cast<int64_t>(source.size())));
  Bytes in(bytes + shift), feedback(bytes + shift + 1, 0xA5), out(out_bytes + shift + 1, 0xA5);
  if (!source.empty()) std::memcpy(in.data() + shift, source.data(), bytes);
  if (residual != nullptr && !source.empty()) std::memcpy(feedback.data() + shift, residual->data(), bytes);
  compress(format, reinterpret_cast<const float*>(in.data() + shift), static_cast<int64_t>(source.size()),
           out.data() + shift, residual != nullptr ? reinterpret_cast<float*>(feedback.data() + shift) : nullptr,
           scale);
  CHECK_EQ(int{out.back()}, 0xA5);
  CHECK_EQ(int{feedback.back()}, 0xA5);
  Compressed result{Bytes(out.begin() + static_cast<std::ptrdiff_t>(shift), out.end() - 1), Floats(source.size())};
  if (!source.empty()) std::memcpy(result.residual.data(), feedback.data() + shift, bytes);
  return result;
}

Floats run_decompress(Format format, const Bytes& data, const Floats& out, bool accumulate, size_t shift) {
  const size_t bytes = out.size() * sizeof(float);
  Bytes in(shift), to(bytes + shift + 1, 0xA5);
  in.insert(in.end(), data.begin(), data.end());
  if (!out.empty()) std::memcpy(to.data() + shift, out.data(), bytes);
  decompress(format, in.data() + shift, reinterpret_cast<float*>(to.data() + shift), static_cast<int64_t>(out.size()),
             accumulate);
  CHECK_EQ(int{to.back()}, 0xA5);
  Floats result(out.size());
  if (!out.empty()) std::memcpy(result.data(), to.data() + shift, bytes);
  return result;
}

TEST(compressed_formats_have_names_and_sizes) {
  for (size_t i = 0; i < std::size(kFormats); ++i) CHECK(find_format(kFormatNames[i]) == kFormats[i]);
  CHECK(!find_format("INT8") && !find_format("") && !find_format("int88"));
  CHECK_EQ(compressed_bytes(Format::kInt8, 0), 0);
  CHECK_EQ(compressed_bytes(Format::kInt8, 256), 4 + 256);
  CHECK_EQ(compressed_bytes(Format::kInt8, 257), 8 + 257);
  CHECK_EQ(compressed_bytes(Format::kInt4, 65), 8 + 33);
  CHECK_EQ(compressed_bytes(Format::kFp16, 7), 14);
  CHECK_EQ(compressed_bytes(Format::kBf16, 7), 14);
}

TEST(compress_agrees_with_plain_loops_on_every_instruction_set) {
  for (const Format format : kFormats) {
    uint32_t seed = 0;
    for (const int64_t numel : kSizes) {
      for (const float scale : {1.0f, 0.3f}) {
        const Floats source = make_values(numel, ++seed);
        Floats values;
        for (const float value : source) values.push_back(value * scale);
        const Compressed expected = reference_compress(format, values);
        for_each_capability([&] {
          for (const size_t shift : {0u, 1u, 4u, 6u, 33u}) {
            CHECK(run_compress(format, source, nullptr, scale, shift).bytes == expected.bytes);
          }
        });
      }
    }
  }
}

TEST(compress_feeds_the_error_back_on_every_instruction_set) {
  for (const Format format : kFormats) {
    uint32_t seed = 100;
    for (const int64_t numel : kSizes) {
      for (const float scale : {1.0f, 0.25f, 1.0f / 3.0f}) {
        const Floats source = make_values(numel, ++seed), residual = make_values(numel, seed + 6);
        Floats values(source.size());
        for (size_t i = 0; i < values.size(); ++i) values[i] = source[i] * scale + residual[i];
        const Compressed expected = reference_compress(format, values);
        for_each_capability([&] {
          for (const size_t shift : {0u, 5u}) {
            const Compressed actual = run_compress(format, source, &residual, scale, shift);
            CHECK(actual.bytes == expected.bytes);
            CHECK(same_bits(actual.residual, expected.residual));
          }
        });
      }
    }
  }
}

// Sent values plus residuals equal the input: decode(out) = v - residual.
TEST(decompress_gives_what_compress_kept_back_from) {
  for (const Format format : kFormats) {
    uint32_t seed = 200;
    for (const int64_t numel : kSizes) {
      const Floats source = make_values(numel, ++seed);
      const Floats zeros(source.size());
      const Floats start = make_values(numel, 1);
      const Compressed sent = run_compress(format, source, &zeros, 1.0f, 0);
      Floats generic, sum;
      set_active_table(&generic_kernels);
      generic = run_decompress(format, sent.bytes, Floats(source.size(), kNan), false, 0);
      for (size_t i = 0; i < source.size(); ++i) {
        const float error = source[i] - generic[i];
        CHECK(std::isfinite(error) ? error == sent.residual[i] : sent.residual[i] == 0);
        sum.push_back(start[i] + generic[i]);
      }
      for_each_capability([&] {
        for (const size_t shift : {0u, 1u, 6u}) {
          CHECK(same_bits(run_decompress(format, sent.bytes, Floats(source.size(), kNan), false, shift), generic));
          CHECK(same_bits(run_decompress(format, sent.bytes, start, true, shift), sum));
        }
      });
    }
  }
}

TEST(a_number_that_is_not_finite_stays_visible_and_poisons_no_residual) {
  for (const Format format : {Format::kInt8, Format::kInt4}) {
    const int64_t block = reference_block(format), numel = 3 * block + 5;
    for (const float bad : {kNan, kInfinity, -kInfinity}) {
      for (const int64_t at : {block, 2 * block - 1, 3 * block + 4}) {
        Floats source = make_values(numel, 1);
        source[static_cast<size_t>(at)] = bad;
        const Floats residual = make_values(numel, 7);
        for_each_capability([&] {
          const Compressed sent = run_compress(format, source, &residual, 1.0f, 0);
          const Floats decoded = run_decompress(format, sent.bytes, Floats(source.size()), false, 0);
          for (int64_t i = 0; i < numel; ++i) {
            const bool broken = i / block == at / block;
            CHECK_EQ(std::isnan(decoded[static_cast<size_t>(i)]), broken);
            CHECK(std::isfinite(sent.residual[static_cast<size_t>(i)]));
            if (broken) CHECK_EQ(sent.residual[static_cast<size_t>(i)], 0.0f);
          }
        });
      }
    }
  }
}

TEST(the_largest_numbers_stay_finite_and_a_sum_that_overflows_does_not) {
  for (const Format format : {Format::kInt8, Format::kInt4}) {
    Floats source(2000, kMax);
    for (size_t i = 0; i < source.size(); i += 3) source[i] = -kMax;
    const Floats nothing(source.size());
    for_each_capability([&] {
      const Compressed sent = run_compress(format, source, &nothing, 1.0f, 0);
      const Floats decoded = run_decompress(format, sent.bytes, Floats(source.size()), false, 0);
      for (size_t i = 0; i < source.size(); ++i) {
        CHECK(std::fabs(decoded[i] / source[i] - 1) < 1e-6f);
        CHECK(std::isfinite(sent.residual[i]));
      }
      const Compressed twice = run_compress(format, source, &source, 1.0f, 0);
      CHECK(std::isnan(run_decompress(format, twice.bytes, Floats(source.size()), false, 0)[7]));
      CHECK(same_bits(twice.residual, nothing));
    });
  }
}

TEST(blocks_too_small_for_a_scale_are_zeros_and_stay_in_the_residual) {
  const Floats source(300, 1e-40f), residual(300);
  for (const Format format : {Format::kInt8, Format::kInt4}) {
    for_each_capability([&] {
      const Compressed sent = run_compress(format, source, &residual, 1.0f, 0);
      CHECK(same_bits(run_decompress(format, sent.bytes, Floats(300, 1.0f), false, 0), Floats(300, 0.0f)));
      CHECK(same_bits(sent.residual, source));
    });
  }
}

TEST(sixteen_bits_keep_what_is_not_finite_but_not_in_the_residual) {
  Floats source(40, 1.0f);
  source[3] = kNan, source[20] = kInfinity, source[37] = -kInfinity, source[38] = kMax, source[39] = -1e5f;
  const Floats residual(source.size(), 0.25f);
  for (const Format format : {Format::kFp16, Format::kBf16}) {
    for_each_capability([&] {
      const Compressed sent = run_compress(format, source, &residual, 1.0f, 0);
      const Floats decoded = run_decompress(format, sent.bytes, Floats(source.size()), false, 0);
      CHECK(std::isnan(decoded[3]));
      CHECK_EQ(decoded[20], kInfinity);
      CHECK_EQ(decoded[37], -kInfinity);
      CHECK_EQ(std::isinf(decoded[39]), format == Format::kFp16);
      for (const float kept : sent.residual) CHECK(std::isfinite(kept));
      for (const size_t i : {3u, 20u, 37u}) CHECK_EQ(sent.residual[i], 0.0f);
    });
  }
}

}  // namespace
}  // namespace torchddp::kernels
