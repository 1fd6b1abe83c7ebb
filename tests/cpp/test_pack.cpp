// Contiguous kernels: every type pair, instruction set, size and alignment against the reference.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "capabilities.h"
#include "check.h"
#include "kernels/kernel_table.h"
#include "kernels/pack.h"
#include "pack_reference.h"

namespace torchddp::kernels {
namespace {

using reference::Bytes;
using reference::kFloatTypes;

constexpr double kScales[] = {0.5, 1.0, 1.0 / 3, -0.0017, 1e-5, 3e4};
constexpr unsigned char kCanary = 0xA5;
constexpr int64_t kCanaryBytes = 128;

std::string describe(DType dst_type, DType src_type, int64_t numel, double scale, int64_t at) {
  return testing::line_of(cpu_capability(), ": type ", static_cast<int>(src_type), " -> ", static_cast<int>(dst_type),
                          ", numel ", numel, ", scale ", scale, ", element ", at);
}

bool is_canary(const unsigned char* begin, const unsigned char* end) {
  return std::all_of(begin, end, [](unsigned char byte) { return byte == kCanary; });
}

// One call into the middle of a guarded buffer, with source and destination misaligned, and one in place.
void check_call(DType dst_type, DType src_type, int64_t numel, double scale, int64_t misalignment) {
  const Bytes elements = reference::random_elements(src_type, numel, static_cast<uint32_t>(numel + 1));
  Bytes source = reference::shifted_by(elements, static_cast<size_t>(misalignment));
  const int64_t dst_bytes = numel * item_size(dst_type);
  Bytes guarded(static_cast<size_t>(2 * kCanaryBytes + misalignment + dst_bytes), kCanary);
  unsigned char* dst = guarded.data() + kCanaryBytes + misalignment;
  scale_cast(dst, dst_type, source.data() + misalignment, src_type, numel, scale);

  const Bytes expected = reference::scale_cast(dst_type, elements.data(), src_type, numel, scale);
  const auto check = [&](const unsigned char* actual) {
    const int64_t at = reference::first_difference(actual, expected.data(), dst_type, numel);
    CHECK_EQ(at < 0 ? "" : describe(dst_type, src_type, numel, scale, at), "");
  };
  check(dst);
  CHECK(is_canary(guarded.data(), dst));
  CHECK(is_canary(dst + dst_bytes, guarded.data() + guarded.size()));
  if (dst_type != src_type) return;
  auto* both = source.data() + misalignment;
  scale_cast(both, dst_type, both, src_type, numel, scale);
  check(both);
}

std::vector<int64_t> interesting_sizes() {
  std::vector<int64_t> sizes;
  for (int64_t numel = 0; numel <= 70; ++numel) sizes.push_back(numel);
  for (const int64_t numel : {127, 128, 129, 255, 256, 257, 1000, 4099}) sizes.push_back(numel);
  return sizes;
}

TEST(scale_cast_agrees_with_the_reference_for_all_types_sizes_and_scales) {
  for_each_capability([] {
    for (const auto& [dst_type, src_type] : reference::float_pairs()) {
      for (const int64_t numel : interesting_sizes()) {
        for (const double scale : kScales) check_call(dst_type, src_type, numel, scale, 0);
      }
    }
  });
}

TEST(scale_cast_takes_any_alignment) {
  for_each_capability([] {
    for (const auto& [dst_type, src_type] : reference::float_pairs()) {
      for (const int64_t misalignment : {1, 2, 4, 6, 8, 12, 31, 33}) {
        for (const int64_t numel : {1, 7, 16, 37, 129}) check_call(dst_type, src_type, numel, 0.25, misalignment);
      }
    }
  });
}

// Where rounding can go wrong: each 16-bit number, the midpoint to the next one, and the floats next to both.
std::vector<float> rounding_boundaries(DType dtype) {
  std::vector<float> values;
  for (int bits = 0; bits < 65535; ++bits) {
    const double here = reference::decode(static_cast<uint16_t>(bits), reference::format_of(dtype));
    const double next = reference::decode(static_cast<uint16_t>(bits + 1), reference::format_of(dtype));
    if (!std::isfinite(here)) continue;
    const auto middle = static_cast<float>(std::isfinite(next) ? (here + next) / 2 : here);
    for (const float value : {static_cast<float>(here), middle}) {
      values.push_back(value);
      values.push_back(std::nextafter(value, INFINITY));
      values.push_back(std::nextafter(value, -INFINITY));
    }
  }
  for (const float value : {65504.f, 65519.996f, 65520.f, 65536.f, 3.4e38f, 3.3961776e38f, 0x1p-149f}) {
    values.push_back(value);
    values.push_back(-value);
  }
  return values;
}

TEST(narrowing_rounds_to_nearest_even_at_every_boundary) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    const std::vector<float> values = rounding_boundaries(dtype);
    const auto numel = static_cast<int64_t>(values.size());
    std::vector<uint16_t> expected(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      expected[i] = reference::encode(values[i], reference::format_of(dtype));
    }
    const std::vector<double> wide(values.begin(), values.end());
    for_each_capability([&] {
      std::vector<uint16_t> narrowed(values.size());
      scale_cast(narrowed.data(), dtype, values.data(), DType::kF32, numel, 1.0);
      CHECK(narrowed == expected);
      std::fill(narrowed.begin(), narrowed.end(), 0);
      scale_cast(narrowed.data(), dtype, wide.data(), DType::kF64, numel, 1.0);
      CHECK(narrowed == expected);
    });
  }
}

TEST(every_16_bit_number_is_widened_exactly_and_scaled_as_in_float) {
  const std::vector<uint16_t> source = reference::all_halves();
  const auto* src = reinterpret_cast<const unsigned char*>(source.data());
  for (const DType src_type : {DType::kF16, DType::kBF16}) {
    for (const DType dst_type : {DType::kF32, src_type}) {
      for (const double scale : {1.0, 1.0 / 3, 0.125, 7e-4, 1.5}) {
        const Bytes expected = reference::scale_cast(dst_type, src, src_type, 65536, scale);
        for_each_capability([&] {
          Bytes actual(expected.size());
          scale_cast(actual.data(), dst_type, source.data(), src_type, 65536, scale);
          CHECK_EQ(reference::first_difference(actual.data(), expected.data(), dst_type, 65536), -1);
        });
      }
    }
  }
}

TEST(nan_keeps_sign_and_upper_payload_and_becomes_quiet) {
  constexpr uint32_t kNan[] = {0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF, 0x7FABE000};
  constexpr uint16_t kAsF16[] = {0x7E00, 0xFE00, 0x7E00, 0xFFFF, 0x7F5F};
  constexpr uint16_t kAsBF16[] = {0x7FC0, 0xFFC0, 0x7FC0, 0xFFFF, 0x7FEB};
  for_each_capability([&] {
    for (size_t i = 0; i < std::size(kNan); ++i) {
      const std::vector<uint32_t> source(37, kNan[i]);
      std::vector<uint16_t> narrowed(37);
      scale_cast(narrowed.data(), DType::kF16, source.data(), DType::kF32, 37, 1.0);
      CHECK(narrowed == std::vector<uint16_t>(37, kAsF16[i]));
      scale_cast(narrowed.data(), DType::kBF16, source.data(), DType::kF32, 37, 1.0);
      CHECK(narrowed == std::vector<uint16_t>(37, kAsBF16[i]));
      std::vector<uint32_t> scaled(37);
      scale_cast(scaled.data(), DType::kF32, source.data(), DType::kF32, 37, 0.5);
      CHECK(scaled == std::vector<uint32_t>(37, kNan[i] | 0x400000));
    }
  });
}

TEST(instruction_sets_agree_bit_for_bit_on_random_patterns) {
  for (const auto& [dst_type, src_type] : reference::float_pairs()) {
    constexpr int64_t kNumel = 5003;
    const Bytes source = reference::random_elements(src_type, kNumel, 11);
    Bytes generic(static_cast<size_t>(kNumel * item_size(dst_type)));
    set_active_table(&generic_kernels);
    scale_cast(generic.data(), dst_type, source.data(), src_type, kNumel, 0.3);
    for_each_capability([&] {
      Bytes actual(generic.size());
      scale_cast(actual.data(), dst_type, source.data(), src_type, kNumel, 0.3);
      CHECK(actual == generic);
    });
  }
}

TEST(plain_copies_keep_every_bit) {
  for (int type = 0; type < kNumDTypes; ++type) {
    const auto dtype = static_cast<DType>(type);
    for (const int64_t numel : interesting_sizes()) {
      const Bytes source = reference::random_bytes(numel * item_size(dtype), 3);
      Bytes actual(source.size());
      scale_cast(actual.data(), dtype, source.data(), dtype, numel, 1.0);
      CHECK(actual == source);
    }
  }
}

TEST(opaque_elements_are_not_scaled_or_cast) {
  int64_t source = 5;
  int64_t actual = 0;
  CHECK_THROWS(std::invalid_argument, scale_cast(&actual, DType::kI64, &source, DType::kI64, 1, 0.5),
               "copied, not scaled or cast", "scale 0.5");
  CHECK_THROWS(std::invalid_argument, scale_cast(&actual, DType::kF64, &source, DType::kI64, 1, 1.0), "source type 8",
               "destination type 0");
  CHECK_THROWS(std::invalid_argument, scale_cast(&actual, DType::kI32, &source, DType::kF32, 1, 1.0), "source type 1",
               "destination type 7");
  CHECK_EQ(actual, 0);
}

TEST(no_elements_need_no_memory) {
  scale_cast(nullptr, DType::kF32, nullptr, DType::kF32, 0, 1.0);
  for_each_capability([] {
    for (const auto& [dst_type, src_type] : reference::float_pairs())
      scale_cast(nullptr, dst_type, nullptr, src_type, 0, 0.5);
  });
}

TEST(capability_can_be_lowered_and_never_raised) {
  const auto supported = supported_tables();
  CHECK_EQ(supported.back(), &generic_kernels);
  for (const char* wish : {static_cast<const char*>(nullptr), "", "avx512", "no such set"}) {
    CHECK_EQ(table_for(wish), supported.front());
  }
  for (const KernelTable* table : supported) CHECK_EQ(table_for(table->capability), table);
}

}  // namespace
}  // namespace torchddp::kernels
