// The launches of the device's pack and unpack: chunks, tiles, blocks, and errors.
#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/pack_device_body.h"
#include "kernels/pack_device_plan.h"

namespace torchddp::kernels::device {
namespace {

// An address that is never read.
void* address(uintptr_t value) { return reinterpret_cast<void*>(value); }

struct Launch {
  int capacity;
  int64_t num_pieces;
  uint32_t num_tiles;
  uint32_t num_blocks;
};

template <int kCapacity>
constexpr int capacity_of(const PieceTable<kCapacity>& /*table*/) {
  return kCapacity;
}

std::vector<Launch> launches_of(const PackJob& job) {
  std::vector<Launch> launches;
  const int error = for_each_launch(job, [&](auto& table, uint32_t num_blocks) {
    CHECK_EQ(table.scale, job.scale);
    launches.push_back({capacity_of(table), table.count, table.first_tile[table.count], num_blocks});
    return 0;
  });
  CHECK_EQ(error, 0);
  return launches;
}

// Consecutive tensors of `numel` fp32 elements at 256-byte boundaries.
std::vector<DevicePiece> pieces_of(const std::vector<int64_t>& numels) {
  std::vector<DevicePiece> pieces;
  int64_t begin = 0;
  uintptr_t outside = uintptr_t{1} << 40;
  for (const int64_t numel : numels) {
    pieces.push_back({address(outside), begin, numel});
    begin += numel;
    outside += static_cast<uintptr_t>(numel * 4 + 255) / 256 * 256;
  }
  return pieces;
}

PackJob pack_job(const std::vector<DevicePiece>& pieces) {
  return {Direction::kPack,
          address(4096),
          DType::kF32,
          pieces.data(),
          static_cast<int64_t>(pieces.size()),
          DType::kF32,
          0.5};
}

TEST(launches_take_as_many_pieces_as_fit_and_the_smallest_table_that_is_enough) {
  const struct {
    int64_t num_pieces;
    std::vector<int> capacities;
    std::vector<int64_t> counts;
  } cases[] = {{0, {}, {}},
               {1, {kFewPieces}, {1}},
               {kFewPieces, {kFewPieces}, {kFewPieces}},
               {kFewPieces + 1, {kSomePieces}, {kFewPieces + 1}},
               {kSomePieces, {kSomePieces}, {kSomePieces}},
               {kSomePieces + 1, {kMaxPieces}, {kSomePieces + 1}},
               {kMaxPieces, {kMaxPieces}, {kMaxPieces}},
               {kMaxPieces + 1, {kMaxPieces, kFewPieces}, {kMaxPieces, 1}},
               {kMaxPieces + kFewPieces + 1, {kMaxPieces, kSomePieces}, {kMaxPieces, kFewPieces + 1}},
               {kMaxPieces + kSomePieces + 1, {kMaxPieces, kMaxPieces}, {kMaxPieces, kSomePieces + 1}},
               {3 * kMaxPieces, {kMaxPieces, kMaxPieces, kMaxPieces}, {kMaxPieces, kMaxPieces, kMaxPieces}}};
  for (const auto& expected : cases) {
    std::vector<int64_t> numels(static_cast<size_t>(expected.num_pieces), 3);
    // Empty tensors take no space.
    for (const size_t at : {numels.size(), numels.size() / 2, size_t{0}}) {
      numels.insert(numels.begin() + static_cast<int64_t>(at), 0);
    }
    const auto pieces = pieces_of(numels);
    const auto launches = launches_of(pack_job(pieces));
    CHECK_EQ(launches.size(), expected.capacities.size());
    for (size_t i = 0; i < std::min(launches.size(), expected.capacities.size()); ++i) {
      CHECK_EQ(launches[i].capacity, expected.capacities[i]);
      CHECK_EQ(launches[i].num_pieces, expected.counts[i]);
    }
  }
}

TEST(every_piece_is_launched_once_with_its_pointers) {
  for (const Direction direction : {Direction::kPack, Direction::kUnpack}) {
    std::vector<int64_t> numels;
    for (int64_t i = 0; i < 3000; ++i) numels.push_back(i * 7919 % 23 * (i % 50 == 0 ? 1000 : 1));
    const auto pieces = pieces_of(numels);
    PackJob job = pack_job(pieces);
    job.direction = direction;
    size_t next = 0;
    for_each_launch(job, [&](auto& table, uint32_t /*num_blocks*/) {
      for (int i = 0; i < table.count; ++i, ++next) {
        while (pieces[next].numel == 0) ++next;
        const void* flat = address(4096 + static_cast<uintptr_t>(pieces[next].begin) * 4);
        CHECK(table.src[i] == (direction == Direction::kPack ? pieces[next].outside : flat));
        CHECK(table.dst[i] == (direction == Direction::kPack ? flat : pieces[next].outside));
        CHECK_EQ(table.numel[i], pieces[next].numel);
        CHECK(table.first_tile[i] < table.first_tile[i + 1]);
      }
      return 0;
    });
    while (next < pieces.size() && pieces[next].numel == 0) ++next;
    CHECK_EQ(next, pieces.size());
  }
}

TEST(tiles_count_from_the_boundary_before_the_destination) {
  const struct {
    uintptr_t dst;
    int64_t numel;
    uint32_t num_tiles;
  } cases[] = {{4096, 1, 1},    {4096, 4096, 1}, {4096, 4097, 2}, {4100, 4095, 1},
               {4100, 4096, 2}, {4108, 4093, 1}, {4108, 4094, 2}, {4096, 40960, 10}};
  for (const auto& expected : cases) {
    const std::vector<DevicePiece> pieces = {{address(uintptr_t{1} << 40), 0, expected.numel}};
    PackJob job = pack_job(pieces);
    job.flat = address(expected.dst);
    CHECK_EQ(launches_of(job).at(0).num_tiles, expected.num_tiles);
  }
}

TEST(a_tile_has_the_same_bytes_at_the_wider_end_whatever_the_types) {
  CHECK_EQ((Tiling<DType::kF32, DType::kF32>::kTile), tile_elements(4));
  CHECK_EQ((Tiling<DType::kF32, DType::kBF16>::kTile), tile_elements(4));
  CHECK_EQ((Tiling<DType::kF16, DType::kF64>::kTile), tile_elements(8));
  CHECK_EQ((Tiling<DType::kF64, DType::kF64>::kTile), tile_elements(8));
  CHECK_EQ((Tiling<DType::kF16, DType::kBF16>::kTile), tile_elements(2));
  CHECK_EQ((Tiling<DType::kU8, DType::kU8>::kTile), tile_elements(1));
  CHECK_EQ(tile_elements(4), 4096);
}

TEST(a_bucket_of_many_billion_elements_is_one_launch_of_a_bounded_grid) {
  const auto pieces = pieces_of({5'000'000'000, 1, 30'000'000'000});
  const auto launches = launches_of(pack_job(pieces));
  CHECK_EQ(launches.size(), 1u);
  CHECK_EQ(launches[0].num_blocks, kMaxBlocks);
  // Destinations: element 0, 5e9 and 5e9 + 1, so 0, 0 and 1 elements after a boundary.
  CHECK_EQ(launches[0].num_tiles, 1'220'704u + 1u + 7'324'219u);
}

TEST(slices_cover_all_tiles_and_differ_by_one_at_most) {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    const uint32_t num_tiles = round % 3 == 0 ? UINT32_MAX - random() % 9 : 1 + random() % 20'000;
    const uint32_t num_blocks = 1 + random() % std::min(num_tiles, kMaxBlocks);
    CHECK_EQ(slice_begin(num_tiles, num_blocks, 0), 0u);
    CHECK_EQ(slice_begin(num_tiles, num_blocks, num_blocks), num_tiles);
    uint32_t wrong = 0;
    for (uint32_t block = 0; block < num_blocks; ++block) {
      const uint32_t length = slice_begin(num_tiles, num_blocks, block + 1) - slice_begin(num_tiles, num_blocks, block);
      if (length != num_tiles / num_blocks && length != num_tiles / num_blocks + 1) ++wrong;
    }
    CHECK_EQ(wrong, 0u);
  }
}

TEST(a_tile_is_found_in_its_piece) {
  std::mt19937 random(7);
  for (const int count : {1, 2, 3, 4, 5, 31, 64, 143, kFewPieces}) {
    PieceTable<kFewPieces> table;
    table.count = count;
    table.first_tile[0] = 0;
    for (int i = 0; i < count; ++i) {
      table.first_tile[i + 1] = table.first_tile[i] + 1 + (random() % 3 == 0 ? random() % 50 : 0);
    }
    for (int piece = 0; piece < count; ++piece) {
      for (uint32_t tile = table.first_tile[piece]; tile < table.first_tile[piece + 1]; ++tile) {
        CHECK_EQ(find_piece(table, tile), piece);
      }
    }
  }
}

TEST(what_cannot_be_done_is_refused_before_anything_is_launched) {
  const std::vector<DevicePiece> good = {{address(1 << 20), 0, 5}, {address(1 << 21), 5, 5}};
  const PackJob job = pack_job(good);
  CHECK_EQ(launches_of(job).size(), 1u);
  const auto check_refused = [](const PackJob& bad) {
    bool launched = false;
    const auto launch = [&](auto& /*table*/, uint32_t /*num_blocks*/) {
      launched = true;
      return 0;
    };
    CHECK_EQ(for_each_launch(bad, launch), kInvalidValue);
    CHECK(!launched);
  };
  const DevicePiece bad_pieces[] = {
      {address(1 << 21), 5, -1},        {address(1 << 21), -1, 5},        {nullptr, 5, 5},
      {address((1 << 21) + 2), 5, 5},   {address(1 << 21), 5, INT64_MAX}, {address(1 << 21), INT64_MAX, 5},
      {address(1 << 21), 5, kMaxNumel},  // more than 2^32 tiles
  };
  for (const DevicePiece& bad_piece : bad_pieces) {
    const std::vector<DevicePiece> pieces = {good[0], bad_piece};
    check_refused(pack_job(pieces));
  }
  PackJob bad = job;
  for (void* flat : {address(0), address(4098)}) {
    bad.flat = flat;
    check_refused(bad);
  }
  bad = job;
  bad.count = -1;
  check_refused(bad);
  bad = job;
  bad.flat_type = DType::kI32;
  check_refused(bad);
  bad.outside_type = DType::kI32;
  check_refused(bad);  // scaled
  bad.scale = 1.0;
  CHECK_EQ(launches_of(bad).size(), 1u);
}

TEST(an_error_of_a_launch_ends_the_job) {
  const auto pieces = pieces_of(std::vector<int64_t>(3 * kMaxPieces, 2));
  int num_launched = 0;
  const int error = for_each_launch(
      pack_job(pieces), [&](auto& /*table*/, uint32_t /*blocks*/) { return ++num_launched == 2 ? 700 : 0; });
  CHECK_EQ(error, 700);
  CHECK_EQ(num_launched, 2);
}

}  // namespace
}  // namespace torchddp::kernels::device
