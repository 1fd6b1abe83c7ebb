// Sums that also detect infinities and NaNs, against plain sums and a separate count.
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "capabilities.h"
#include "check.h"
#include "kernels/pack.h"
#include "kernels/sum.h"
#include "pack_reference.h"

namespace torchddp::kernels {
namespace {

using reference::Bytes;

using reference::kFloatTypes;
constexpr int64_t kRanks[] = {1, 2, 3, 5, 13};

// Small integers, whose sums are all finite.
Bytes finite_elements(DType dtype, int64_t numel, int64_t rank) {
  Bytes data(static_cast<size_t>(numel * item_size(dtype)));
  for (int64_t i = 0; i < numel; ++i) {
    reference::set(data.data(), dtype, i, static_cast<double>((i * 37 + rank * 101) % 97) - 48);
  }
  return data;
}

// Sources and targets of one call, misaligned by `misalignment` bytes; all sources are also targets (like ranks' blocks), or none.
class Call {
 public:
  Call(DType type, std::vector<Bytes> sources, std::vector<double> scales = {}, size_t misalignment = 0)
      : type_(type), sources_(std::move(sources)), scales_(std::move(scales)), misalignment_(misalignment) {}

  // Checks sums, counts and the verdict on the sums.
  void check(bool in_place) const {
    const auto numel = static_cast<int64_t>(sources_[0].size()) / item_size(type_);
    const Bytes want = plain();
    std::vector<Bytes> memory = shifted();
    Bytes apart(want.size() + misalignment_);
    std::vector<const void*> srcs;
    std::vector<void*> dsts;
    for (Bytes& source : memory) {
      srcs.push_back(source.data() + misalignment_);
      if (in_place) dsts.push_back(source.data() + misalignment_);
    }
    if (!in_place) dsts.push_back(apart.data() + misalignment_);
    std::vector<int64_t> counts(sources_.size());
    std::iota(counts.begin(), counts.end(), 100);
    const bool bad = reduce_ranks(dsts, srcs, type_, ReduceOp::kSum, numel, scales_, counts);
    for (const void* dst : dsts) CHECK(want.empty() || std::memcmp(dst, want.data(), want.size()) == 0);
    for (size_t rank = 0; rank < sources_.size(); ++rank) {
      const auto count = static_cast<int64_t>(100 + rank) + count_non_finite(sources_[rank].data(), type_, numel);
      CHECK_EQ(counts[rank], count);
    }
    CHECK_EQ(bad, count_non_finite(want.data(), type_, numel) > 0);
  }

 private:
  std::vector<Bytes> shifted() const {
    std::vector<Bytes> memory;
    for (const Bytes& source : sources_) memory.push_back(reference::shifted_by(source, misalignment_));
    return memory;
  }

  Bytes plain() const {
    std::vector<const void*> srcs;
    for (const Bytes& source : sources_) srcs.push_back(source.data());
    Bytes result(sources_[0].size());
    void* const dsts[] = {result.data()};
    const auto numel = static_cast<int64_t>(result.size()) / item_size(type_);
    reduce_ranks(dsts, srcs, type_, ReduceOp::kSum, numel, scales_);
    return result;
  }

  DType type_;
  std::vector<Bytes> sources_;
  std::vector<double> scales_;
  size_t misalignment_;
};

std::vector<double> some_scales(int64_t num_ranks) {
  std::vector<double> scales;
  for (int64_t rank = 0; rank < num_ranks; ++rank) scales.push_back(rank == 1 ? 1.0 : 1.0 / 3);
  return scales;
}

void check_both_ways(DType type, const std::vector<Bytes>& sources, size_t misalignment = 0) {
  for (const bool in_place : {false, true}) {
    Call(type, sources, {}, misalignment).check(in_place);
    if (can_scale(type)) Call(type, sources, some_scales(std::ssize(sources)), misalignment).check(in_place);
  }
}

std::vector<Bytes> finite_sources(DType type, int64_t num_ranks, int64_t numel) {
  std::vector<Bytes> sources;
  for (int64_t rank = 0; rank < num_ranks; ++rank) sources.push_back(finite_elements(type, numel, rank));
  return sources;
}

TEST(checked_sums_of_anything_are_the_plain_ones) {
  for_each_capability([] {
    for (const DType type : kFloatTypes) {
      for (const int64_t num_ranks : kRanks) {
        for (int64_t numel = 0; numel <= 300; numel += numel < 70 ? 1 : 23) {
          std::vector<Bytes> sources;
          for (int64_t rank = 0; rank < num_ranks; ++rank) {
            sources.push_back(reference::random_elements(type, numel, static_cast<uint32_t>(numel * 8 + rank)));
          }
          check_both_ways(type, sources, static_cast<size_t>(numel % 3 * 7));
        }
      }
    }
  });
}

TEST(checked_sums_find_one_in_any_place_of_any_source) {
  const double values[] = {NAN, INFINITY, -INFINITY};
  for_each_capability([&] {
    for (const DType type : kFloatTypes) {
      for (const int64_t num_ranks : {1, 2, 3}) {
        for (const int64_t numel : {1, 13, 64, 150}) {
          std::vector<Bytes> sources = finite_sources(type, num_ranks, numel);
          check_both_ways(type, sources);
          for (int64_t place = 0; place < num_ranks * numel; ++place) {
            Bytes& source = sources[static_cast<size_t>(place % num_ranks)];
            const Bytes before = source;
            reference::set(source.data(), type, place / num_ranks, values[place % 3]);
            check_both_ways(type, sources);
            source = before;
          }
        }
      }
    }
  });
}

TEST(checked_sums_of_many_ranks_find_one_anywhere_in_a_tile) {
  constexpr int64_t kNumRanks = 20;
  constexpr int64_t kTile = 4096;  // 2048 for kF64
  constexpr int64_t kNumel = 2 * kTile + 100;
  for_each_capability([&] {
    for (const DType type : kFloatTypes) {
      for (const int64_t rank : {0, 7, 8, 19}) {
        std::vector<Bytes> sources = finite_sources(type, kNumRanks, kNumel);
        for (const int64_t place : {0L, kTile - 1, kTile, kTile + 70, 2 * kTile, kNumel - 1}) {
          reference::set(sources[static_cast<size_t>(rank)].data(), type, place, rank == 7 ? NAN : INFINITY);
        }
        check_both_ways(type, sources, 4);
      }
    }
  });
}

// Infinities of opposite signs in ranks' blocks, and NaNs with the smallest, the largest and a signaling payload.
TEST(checked_sums_find_every_kind_of_nan) {
  for_each_capability([] {
    for (const uint32_t bits :
         {0x7F800000u, 0xFF800000u, 0x7F800001u, 0x7FC00000u, 0xFFFFFFFFu, 0x7FFFFFFFu, 0xFFC12345u}) {
      std::vector<Bytes> sources = finite_sources(DType::kF32, 2, 70);
      std::memcpy(sources[1].data() + 4 * 17, &bits, sizeof(bits));
      check_both_ways(DType::kF32, sources);
    }
    std::vector<Bytes> sources = finite_sources(DType::kF32, 2, 70);
    reference::set(sources[0].data(), DType::kF32, 3, INFINITY);
    reference::set(sources[1].data(), DType::kF32, 3, -INFINITY);
    check_both_ways(DType::kF32, sources);
  });
}

// At the boundary, from finite terms of one sign: the largest sum that stays finite, and the next one.
TEST(checked_sums_tell_of_sums_that_overflow) {
  struct Border {
    DType type;
    double a, finite, infinite;
  };
  const Border borders[] = {
      {DType::kF64, 0x1p1023, 0x1.ffffffffffffep1022, 0x1p1023},
      {DType::kF32, 0x1p127, 0x1.fffffcp126, 0x1p127},
      {DType::kF16, 65504, 15.9921875, 16},  // halfway to 65536, which is rounded up
      {DType::kBF16, 0x1.fep127, 0x1.fcp118, 0x1p119},
  };
  for_each_capability([&] {
    for (const auto& [type, a, finite, infinite] : borders) {
      for (const double sign : {1.0, -1.0}) {
        for (const double b : {finite, infinite}) {
          for (const int64_t place : {0, 40, 148, 149}) {
            std::vector<Bytes> sources = finite_sources(type, 2, 150);
            reference::set(sources[0].data(), type, place, sign * a);
            reference::set(sources[1].data(), type, place, sign * b);
            Call(type, sources).check(true);
            std::vector<const void*> srcs{sources[0].data(), sources[1].data()};
            std::vector<int64_t> counts(2);
            CHECK_EQ(reduce_ranks({}, srcs, type, ReduceOp::kSum, 150, {}, counts), b == infinite);
            CHECK(counts == std::vector<int64_t>(2));
          }
        }
      }
    }
  });
}

TEST(checked_sums_are_of_floats) {
  const float value = 1;
  const void* const srcs[] = {&value};
  std::vector<int64_t> counts(1), two(2);
  const double scale = 0.5;
  const std::span<const double> scales(&scale, 1);
  const auto checked = [&](DType type, ReduceOp op, int64_t numel, std::span<const double> factors,
                           std::span<int64_t> found) {
    return reduce_ranks({}, srcs, type, op, numel, factors, found);
  };
  CHECK_THROWS(std::invalid_argument, checked(DType::kI32, ReduceOp::kSum, 1, {}, counts), "floats");
  CHECK_THROWS(std::invalid_argument, checked(DType::kF32, ReduceOp::kMin, 1, {}, counts), "sums");
  CHECK_THROWS(std::invalid_argument, checked(DType::kBF16, ReduceOp::kSum, 1, scales, counts), "scaled");
  CHECK_THROWS(std::invalid_argument, checked(DType::kF32, ReduceOp::kSum, 1, {}, two), "one count");
  CHECK(!checked(DType::kF32, ReduceOp::kSum, 0, {}, counts));
}

}  // namespace
}  // namespace torchddp::kernels
