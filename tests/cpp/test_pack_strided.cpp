// Strided views against an element-by-element walk; bytes outside the view must not change.
#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "check.h"
#include "kernels/kernel_table.h"
#include "kernels/pack.h"
#include "pack_reference.h"

namespace torchddp::kernels {
namespace {

using reference::Bytes;
using Longs = std::vector<int64_t>;

struct View {
  Longs strides;
  int64_t base = 0;   // element that index (0, .., 0) maps to
  int64_t numel = 0;  // elements of the buffer below
};

// A buffer just large enough for the view, including negative strides.
View make_view(const Longs& sizes, const Longs& strides) {
  View view{strides, 0, 1};
  int64_t highest = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t reach = (sizes[i] - 1) * strides[i];
    if (sizes[i] > 0) (reach < 0 ? view.base : highest) += reach < 0 ? -reach : reach;
  }
  view.numel = view.base + highest + 1;
  return view;
}

Longs contiguous_strides(const Longs& sizes) {
  Longs strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= std::max<int64_t>(sizes[i], 1)) strides[i] = step;
  return strides;
}

// Dense in the order `permutation`, outermost dimension first.
Longs permuted_strides(const Longs& sizes, const std::vector<size_t>& permutation) {
  Longs strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= sizes[permutation[i]]) strides[permutation[i]] = step;
  return strides;
}

void check_strided(const Longs& sizes, const Longs& dst_strides, DType dst_type, const Longs& src_strides,
                   DType src_type, double scale) {
  const View dst = make_view(sizes, dst_strides);
  const View src = make_view(sizes, src_strides);
  const Bytes source = reference::random_elements(src_type, src.numel, 5);
  const Bytes untouched = reference::random_elements(dst_type, dst.numel, 6);
  Bytes actual = untouched;
  Bytes expected = untouched;
  scale_cast_strided(actual.data() + dst.base * item_size(dst_type), dst_type, dst_strides,
                     source.data() + src.base * item_size(src_type), src_type, src_strides, sizes, scale);

  const int64_t numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  for (int64_t flat = 0; flat < numel; ++flat) {
    int64_t dst_at = dst.base;
    int64_t src_at = src.base;
    int64_t rest = flat;
    for (size_t dim = sizes.size(); dim-- > 0; rest /= sizes[dim]) {
      dst_at += rest % sizes[dim] * dst_strides[dim];
      src_at += rest % sizes[dim] * src_strides[dim];
    }
    reference::scale_cast_one(expected.data(), dst_type, dst_at, source.data(), src_type, src_at, scale);
  }
  CHECK_EQ(reference::first_difference(actual.data(), expected.data(), dst_type, dst.numel), -1);
}

// Equal and different types, copied and scaled, and one opaque type.
void check_layout(const Longs& sizes, const Longs& dst_strides, const Longs& src_strides) {
  check_strided(sizes, dst_strides, DType::kF32, src_strides, DType::kF32, 1.0);
  check_strided(sizes, dst_strides, DType::kF32, src_strides, DType::kF32, 1.0 / 3);
  check_strided(sizes, dst_strides, DType::kBF16, src_strides, DType::kF32, 0.5);
  check_strided(sizes, dst_strides, DType::kF64, src_strides, DType::kF16, 0.7);
  check_strided(sizes, dst_strides, DType::kF16, src_strides, DType::kF16, 1.0);
  for (const DType opaque : {DType::kU8, DType::kI16, DType::kI32, DType::kI64}) {
    check_strided(sizes, dst_strides, opaque, src_strides, opaque, 1.0);
  }
}

TEST(strided_channels_last) {
  const Longs sizes = {4, 5, 3, 7};
  const Longs channels_last = permuted_strides(sizes, {0, 2, 3, 1});
  check_layout(sizes, channels_last, channels_last);
  check_layout(sizes, channels_last, contiguous_strides(sizes));
  check_layout(sizes, contiguous_strides(sizes), channels_last);
}

TEST(strided_transposed_matrices_of_many_sizes) {
  for (const int64_t rows : {1, 2, 17, 63, 64, 65, 130}) {
    for (const int64_t columns : {1, 3, 64, 71}) {
      check_layout({rows, columns}, {columns, 1}, {1, rows});
      check_layout({rows, columns}, {1, rows}, {columns, 1});
    }
  }
}

TEST(strided_rows_longer_than_the_staging_buffer) {
  for (const int64_t numel : {255, 256, 257, 1025}) {
    check_layout({numel}, {1}, {3});
    check_layout({numel}, {2}, {1});
    check_layout({numel}, {2}, {3});
  }
}

TEST(strided_expanded_sources) {
  check_layout({5, 9}, {9, 1}, {0, 1});
  check_layout({5, 9}, {9, 1}, {1, 0});
  check_layout({5, 9}, {1, 5}, {0, 0});
  check_layout({3, 4, 5}, {20, 5, 1}, {5, 0, 1});
}

TEST(strided_slices_and_reversed_sources) {
  check_layout({6, 10}, {10, 1}, {40, 2});
  check_layout({6, 10}, {30, 2}, {12, 1});
  check_layout({6, 10}, {10, 1}, {-10, 1});
  check_layout({6, 10}, {10, 1}, {10, -1});
}

TEST(strided_without_dimensions_and_without_elements) {
  check_layout({}, {}, {});
  check_layout({0}, {1}, {1});
  check_layout({3, 0, 2}, {2, 2, 1}, {1, 1, 1});
  const Longs sizes = {4, 0};
  const Longs strides = {0, 0};
  scale_cast_strided(nullptr, DType::kF32, strides, nullptr, DType::kF32, strides, sizes, 0.5);
}

TEST(strided_dimensions_of_size_one_have_no_say) {
  check_layout({1, 6, 1, 5}, {1000, 5, 77, 1}, {1, 5, -9, 1});
  check_layout({1, 1}, {0, 3}, {17, 0});
}

TEST(strided_takes_the_most_dimensions_and_no_more) {
  Longs sizes(kMaxDims, 1);
  for (const size_t dim : {0, 9, 30, 63}) sizes[dim] = 3;
  check_layout(sizes, contiguous_strides(sizes), contiguous_strides(sizes));
  std::vector<size_t> backwards(sizes.size());
  std::iota(backwards.rbegin(), backwards.rend(), size_t{0});
  check_layout(sizes, contiguous_strides(sizes), permuted_strides(sizes, backwards));

  const Longs too_many(kMaxDims + 1, 1), two = {1, 1}, one = {1};
  const auto call = [](const Longs& dst_strides, const Longs& src_strides, const Longs& of) {
    float element = 0;
    scale_cast_strided(&element, DType::kF32, dst_strides, &element, DType::kF32, src_strides, of, 0.5);
  };
  using Error = std::invalid_argument;
  CHECK_THROWS(Error, call(too_many, too_many, too_many), "65 sizes", "at most 64");
  CHECK_THROWS(Error, call(one, two, two), "2 sizes", "1 destination strides", "2 source strides");
  CHECK_THROWS(Error, call(two, one, two), "1 source strides");
}

TEST(strided_in_place_scales_each_element_once) {
  const Longs sizes = {7, 70};
  const Longs strides = {1, 7};
  std::vector<float> data(490, 3.0f);
  scale_cast_strided(data.data(), DType::kF32, strides, data.data(), DType::kF32, strides, sizes, 0.5);
  CHECK(data == std::vector<float>(490, 1.5f));
}

TEST(strided_random_layouts) {
  std::mt19937 random(20240607);
  for (int round = 0; round < 300; ++round) {
    const size_t num_dims = 1 + random() % 5;
    Longs sizes(num_dims);
    for (int64_t& size : sizes) size = 1 + static_cast<int64_t>(random() % 7);
    std::vector<size_t> order(num_dims);
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    Longs dst_strides = permuted_strides(sizes, order);
    std::shuffle(order.begin(), order.end(), random);
    Longs src_strides = permuted_strides(sizes, order);
    if (random() % 2 == 0) {  // gaps, expanded and reversed dimensions
      const auto gap = static_cast<int64_t>(1 + random() % 3);
      for (int64_t& stride : dst_strides) stride *= gap;
      for (int64_t& stride : src_strides) stride *= static_cast<int64_t>(random() % 4) - 1;
    }
    const auto capabilities = supported_capabilities();
    set_cpu_capability(capabilities[static_cast<size_t>(round) % capabilities.size()]);
    check_layout(sizes, dst_strides, src_strides);
  }
  set_cpu_capability(supported_capabilities().front());
}

}  // namespace
}  // namespace torchddp::kernels
