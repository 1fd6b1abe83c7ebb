// Statistics: every type, instruction set, size and alignment against a plain loop.
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "capabilities.h"
#include "check.h"
#include "kernels/pack_table.h"
#include "kernels/stats.h"
#include "pack_reference.h"

namespace torchddp::kernels {
namespace {

using reference::Bytes;
using reference::kFloatTypes;

// Around one round of lanes, one chunk and several.
constexpr int64_t kSizes[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 1023, 1024, 1025, 2048, 2500, 5003};

// Ordinary numbers only.
Bytes finite_elements(DType dtype, int64_t numel, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes data(static_cast<size_t>(numel * item_size(dtype)));
  for (int64_t i = 0; i < numel; ++i) {
    reference::set(data.data(), dtype, i, std::ldexp(static_cast<double>(random()) - 0x1p31, -34));
  }
  return data;
}

// Of two NaNs, compilers choose which one an addition passes on.
bool same_bits(double a, double b) { return std::memcmp(&a, &b, sizeof(a)) == 0 || (std::isnan(a) && std::isnan(b)); }

// Terms have one sign, so the error of a sum of n terms is below n roundings of the result.
bool is_close(double actual, long double expected, int64_t numel) {
  return std::abs(static_cast<long double>(actual) - expected) <= expected * static_cast<double>(numel) * 0x1p-52;
}

TEST(measure_agrees_with_a_plain_loop_and_between_instruction_sets) {
  for (const DType dtype : kFloatTypes) {
    for (const int64_t numel : kSizes) {
      const Bytes data = finite_elements(dtype, numel, static_cast<uint32_t>(numel));
      long double expected = 0;
      for (int64_t i = 0; i < numel; ++i) {
        const long double value = reference::get(data.data(), dtype, i);
        expected += value * value;
      }
      CHECK(set_cpu_capability("generic"));
      const GradStats generic = measure(data.data(), dtype, numel);
      for_each_capability([&] {
        for (const size_t misalignment : {0u, 1u, 2u, 6u, 12u, 33u}) {
          Bytes shifted(misalignment);
          shifted.insert(shifted.end(), data.begin(), data.end());
          const GradStats stats = measure(shifted.data() + misalignment, dtype, numel);
          CHECK(is_close(stats.sum_squares, expected, numel));
          CHECK(same_bits(stats.sum_squares, generic.sum_squares));
          CHECK_EQ(stats.non_finite, 0);
        }
      });
    }
  }
}

TEST(every_infinity_and_nan_is_counted) {
  for (const DType dtype : kFloatTypes) {
    for (const int64_t numel : {1, 5, 16, 40, 1024, 1030, 3000}) {
      std::mt19937 random(static_cast<uint32_t>(numel));
      Bytes data = finite_elements(dtype, numel, 3);
      int64_t expected = 0;
      bool has_nan = false;
      for (int64_t i = 0; i < numel; ++i) {
        if (random() % 3 != 0) continue;
        const double value = random() % 2 == 0 ? NAN : random() % 2 == 0 ? INFINITY : -INFINITY;
        reference::set(data.data(), dtype, i, value);
        ++expected;
        has_nan |= std::isnan(value);
      }
      for_each_capability([&] {
        const GradStats stats = measure(data.data(), dtype, numel);
        CHECK_EQ(stats.non_finite, expected);
        CHECK_EQ(std::isnan(stats.sum_squares), has_nan);
        CHECK_EQ(std::isfinite(stats.sum_squares), expected == 0);
      });
    }
  }
}

TEST(the_largest_and_smallest_numbers_are_finite) {
  const struct {
    DType dtype;
    double value;
  } cases[] = {{DType::kF64, 1.7976931348623157e308},
               {DType::kF32, 3.4028234663852886e38},
               {DType::kF16, 65504.0},
               {DType::kBF16, 0x1.fep127},
               {DType::kF64, 0x1p-1074},
               {DType::kF32, 0x1p-149},
               {DType::kF16, 0x1p-24},
               {DType::kBF16, 0x1p-133}};
  for (const auto& [dtype, value] : cases) {
    Bytes data(static_cast<size_t>(37 * item_size(dtype)));
    for (int64_t i = 0; i < 37; ++i) reference::set(data.data(), dtype, i, i % 2 == 0 ? value : -value);
    for_each_capability([&, dtype = dtype, value = value] {
      const GradStats stats = measure(data.data(), dtype, 37);
      CHECK_EQ(stats.non_finite, 0);
      // fp64 alone has squares that double can't hold: infinity and zero.
      const double expected = value * value * 37;
      CHECK(stats.sum_squares == expected || is_close(stats.sum_squares, expected, 37));
    });
  }
}

TEST(statistics_merge) {
  GradStats stats{1.5, 2};
  stats.merge({0.25, 3});
  CHECK_EQ(stats.sum_squares, 1.75);
  CHECK_EQ(stats.non_finite, 5);
}

TEST(opaque_elements_have_no_statistics) {
  int64_t word = 1;
  CHECK_THROWS(std::invalid_argument, measure(&word, DType::kI64, 1), "only floating point", "type 8");
}

TEST(no_elements_have_empty_statistics) {
  for (const DType dtype : kFloatTypes) {
    const GradStats stats = measure(nullptr, dtype, 0);
    CHECK_EQ(stats.sum_squares, 0.0);
    CHECK_EQ(stats.non_finite, 0);
  }
}

}  // namespace
}  // namespace torchddp::kernels
