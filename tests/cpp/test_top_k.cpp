// Top-k compared with a sort.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/top_k.h"
#include "pack_reference.h"

namespace torchddp::kernels {
namespace {

using reference::Floats;
using reference::kInfinity;
using reference::kNan;
using reference::same_bits;

struct Selected {
  std::vector<int32_t> indices;
  Floats values;
  Floats residual;
};

bool is_larger(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && !std::isnan(b);
  return std::fabs(a) > std::fabs(b);
}

Selected reference_top_k(const Floats& values, size_t k) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int32_t index) { return values[static_cast<size_t>(index)]; };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return is_larger(at(a), at(b)); });
  Selected result{{order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k)}, {}, values};
  std::sort(result.indices.begin(), result.indices.end());
  for (const int32_t index : result.indices) {
    result.values.push_back(at(index));
    result.residual[static_cast<size_t>(index)] = 0;
  }
  for (float& kept : result.residual) kept = std::isfinite(kept) ? kept : 0;
  return result;
}

Selected run_top_k(const Floats& source, size_t k, const Floats* residual, float scale) {
  Selected result{std::vector<int32_t>(k, -1), Floats(k), residual != nullptr ? *residual : Floats()};
  select_top_k(source.data(), static_cast<int64_t>(source.size()), static_cast<int64_t>(k), result.indices.data(),
               result.values.data(), residual != nullptr ? result.residual.data() : nullptr, scale);
  return result;
}

// Widely spread; close together, differing in the last bits; few distinct values, so that most tie; with non-finite values.
Floats make_values(int64_t numel, uint32_t seed, int kind) {
  std::mt19937 random(seed);
  constexpr float kFew[] = {0.0f, -0.0f, 1.0f, -1.0f, 2.0f, 1e-45f};
  constexpr float kBroken[] = {kNan, -kNan, kInfinity, -kInfinity, 3.4028235e38f};
  Floats values(static_cast<size_t>(numel));
  for (float& value : values) {
    const auto bits = static_cast<int32_t>(random());
    value = std::ldexp(static_cast<float>(bits), kind == 0 ? static_cast<int>(random() % 40) - 60 : -31);
    if (kind == 1) value = 1.0f + static_cast<float>(bits & 63) * 0x1p-23f;
    if (kind == 2) value = kFew[random() % std::size(kFew)];
    if (kind == 3 && random() % 3 == 0) value = kBroken[random() % std::size(kBroken)];
  }
  return values;
}

void check_top_k(const Floats& source, const Floats* residual, float scale, std::initializer_list<size_t> counts) {
  Floats values = source;
  for (size_t i = 0; residual != nullptr && i < values.size(); ++i) values[i] = source[i] * scale + (*residual)[i];
  for (const size_t k : counts) {
    const Selected expected = reference_top_k(values, k);
    const Selected actual = run_top_k(source, k, residual, scale);
    CHECK(actual.indices == expected.indices);
    CHECK(same_bits(actual.values, expected.values));
    if (residual != nullptr) CHECK(same_bits(actual.residual, expected.residual));
  }
}

TEST(top_k_agrees_with_a_sort_and_keeps_what_it_does_not_send) {
  for (const int64_t numel : {1, 2, 31, 32, 33, 100, 1023, 1025, 5000, 70001}) {
    for (int kind = 0; kind < 4; ++kind) {
      const Floats source = make_values(numel, static_cast<uint32_t>(numel), kind);
      const auto all = static_cast<size_t>(numel);
      check_top_k(source, nullptr, 1.0f, {0, 1, all / 100, all / 10, all / 2, all - 1, all});
      const Floats residual = make_values(numel, 6, kind == 3 ? 0 : kind);
      for (const float scale : {1.0f, 1.0f / 3.0f}) {
        check_top_k(source, &residual, scale, {0, all / 20, all / 2, all});
      }
    }
  }
}

TEST(top_k_takes_the_first_of_equal_magnitudes_and_every_nan_before_an_infinity) {
  const Floats source = {1, -2, kInfinity, 2, kNan, 2, -kInfinity, -kNan, -2};
  CHECK((run_top_k(source, 2, nullptr, 1.0f).indices == std::vector<int32_t>{4, 7}));
  CHECK((run_top_k(source, 3, nullptr, 1.0f).indices == std::vector<int32_t>{2, 4, 7}));
  CHECK((run_top_k(source, 6, nullptr, 1.0f).indices == std::vector<int32_t>{1, 2, 3, 4, 6, 7}));
}

// The larger numbers are all in the sample, but fewer than k.
TEST(top_k_is_exact_where_its_sample_misleads) {
  Floats source(size_t{1} << 18, 1.0f);
  for (size_t i = 0; i < 8192; ++i) source[i * 32 + i * 7919 % 32] = -2.0f;
  source[1000] = 1.5f, source[70] = kNan;
  const Floats residual(source.size(), 0.25f);
  check_top_k(source, &residual, 1.0f, {7000, 9000});
  check_top_k(source, nullptr, 1.0f, {7000, 9000});
}

TEST(top_k_of_nothing) {
  CHECK(run_top_k({}, 0, nullptr, 1.0f).indices.empty());
  const Floats residual;
  CHECK(run_top_k({}, 0, &residual, 1.0f).indices.empty());
}

}  // namespace
}  // namespace torchddp::kernels
