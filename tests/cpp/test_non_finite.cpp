// Infinities and NaNs: every type, instruction set, size and alignment against a scalar loop.
#include <cmath>

#include "capabilities.h"
#include "check.h"
#include "kernels/pack.h"
#include "pack_reference.h"

namespace torchddp::kernels {
namespace {

using reference::Bytes;
using reference::kFloatTypes;

// Sizes around one round of vectors, one chunk and several chunks.
constexpr int64_t kSizes[] = {0, 1, 2, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049, 5003};

TEST(non_finite_elements_are_counted) {
  for (const DType dtype : kFloatTypes) {
    for (const int64_t numel : kSizes) {
      const Bytes data = reference::random_elements(dtype, numel, static_cast<uint32_t>(numel + 1));
      int64_t expected = 0;
      for (int64_t i = 0; i < numel; ++i) expected += std::isfinite(reference::get(data.data(), dtype, i)) ? 0 : 1;
      for_each_capability([&] {
        for (const size_t misalignment : {0u, 2u, 6u, 33u}) {
          const Bytes shifted = reference::shifted_by(data, misalignment);
          CHECK_EQ(count_non_finite(shifted.data() + misalignment, dtype, numel), expected);
        }
      });
    }
  }
}

TEST(one_in_any_place_is_found) {
  for (const DType dtype : kFloatTypes) {
    for (const int64_t numel : {1, 64, 130, 2050}) {
      Bytes data(static_cast<size_t>(numel * item_size(dtype)));
      for_each_capability([&] {
        CHECK_EQ(count_non_finite(data.data(), dtype, numel), 0);
        for (int64_t i = 0; i < numel; ++i) {
          reference::set(data.data(), dtype, i, i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : -INFINITY);
          CHECK_EQ(count_non_finite(data.data(), dtype, numel), 1);
          reference::set(data.data(), dtype, i, 0);
        }
      });
    }
  }
}

TEST(the_largest_numbers_are_finite) {
  const std::pair<DType, double> cases[] = {{DType::kF64, 1.7976931348623157e308},
                                            {DType::kF32, 3.4028234663852886e38},
                                            {DType::kF16, 65504.0},
                                            {DType::kBF16, 0x1.fep127}};
  for (const auto& [dtype, value] : cases) {
    Bytes data(static_cast<size_t>(70 * item_size(dtype)));
    for (int64_t i = 0; i < 70; ++i) reference::set(data.data(), dtype, i, i % 2 == 0 ? value : -value);
    for_each_capability([&, dtype = dtype] { CHECK_EQ(count_non_finite(data.data(), dtype, 70), 0); });
  }
}

TEST(scale_cast_counting_casts_and_counts_the_source) {
  for_each_capability([] {
    for (const auto& [dst_type, src_type] : reference::float_pairs()) {
      for (const int64_t numel : kSizes) {
        for (const double scale : {1.0, 1.0 / 3}) {
          const Bytes source = reference::random_elements(src_type, numel, static_cast<uint32_t>(numel + 5));
          Bytes expected(static_cast<size_t>(numel * item_size(dst_type)));
          Bytes actual(expected.size());
          scale_cast(expected.data(), dst_type, source.data(), src_type, numel, scale);
          const int64_t count = scale_cast_counting(actual.data(), dst_type, source.data(), src_type, numel, scale);
          CHECK(actual == expected);
          CHECK_EQ(count, count_non_finite(source.data(), src_type, numel));
        }
      }
    }
  });
}

TEST(counting_works_in_place) {
  for (const DType dtype : kFloatTypes) {
    Bytes data = reference::random_elements(dtype, 5003, 9);
    Bytes expected(data.size());
    scale_cast(expected.data(), dtype, data.data(), dtype, 5003, 0.3);
    const int64_t before = count_non_finite(data.data(), dtype, 5003);
    CHECK_EQ(scale_cast_counting(data.data(), dtype, data.data(), dtype, 5003, 0.3), before);
    CHECK(data == expected);
  }
}

TEST(opaque_elements_are_all_finite) {
  const int64_t words[] = {-1, 0x7FF0000000000000};
  int64_t copied[2] = {};
  CHECK_EQ(count_non_finite(words, DType::kI64, 2), 0);
  CHECK_EQ(scale_cast_counting(copied, DType::kI64, words, DType::kI64, 2, 1.0), 0);
  CHECK_EQ(copied[0], -1);
}

}  // namespace
}  // namespace torchddp::kernels
