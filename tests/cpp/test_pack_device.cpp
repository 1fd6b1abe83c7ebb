// The bodies of the device kernels, on the CPU: results are bitwise equal to scale_cast's, and nothing else is written.
//
// In-place cases detect an element that is handled twice: it would be scaled twice.
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kernels/pack.h"
#include "pack_device_loop.h"
#include "pack_reference.h"

namespace torchddp::kernels::device {
namespace {

using reference::Bytes;
using reference::kFloatTypes;

constexpr unsigned char kCanary = 0xA5;
constexpr int64_t kGuardBytes = 64;

// A tensor's memory, `misalignment` bytes after a 64-byte boundary, between guards. ASan also detects reads of the guards
// until they are checked (except for up to 7 bytes before the tensor, which it can't mark).
class Tensor {
 public:
  Tensor(DType dtype, int64_t numel, int64_t misalignment)
      : bytes_(numel * item_size(dtype)), memory_(static_cast<size_t>(3 * kGuardBytes + bytes_), kCanary) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    begin_ = kGuardBytes + static_cast<int64_t>((64 - address % 64) % 64) - 64 + misalignment;
    if (begin_ < kGuardBytes / 2) begin_ += 64;
    ASAN_POISON_MEMORY_REGION(memory_.data(), static_cast<size_t>(begin_));
    ASAN_POISON_MEMORY_REGION(data() + bytes_, memory_.size() - static_cast<size_t>(begin_ + bytes_));
  }

  unsigned char* data() { return memory_.data() + begin_; }
  const unsigned char* data() const { return memory_.data() + begin_; }
  int64_t bytes() const { return bytes_; }

  void set(const Bytes& elements) { std::copy(elements.begin(), elements.end(), data()); }
  Bytes get() const { return {data(), data() + bytes_}; }

  bool guards_are_whole() const {
    ASAN_UNPOISON_MEMORY_REGION(memory_.data(), memory_.size());
    const auto is_canary = [](unsigned char byte) { return byte == kCanary; };
    return std::all_of(memory_.begin(), memory_.begin() + begin_, is_canary) &&
           std::all_of(memory_.begin() + begin_ + bytes_, memory_.end(), is_canary);
  }

 private:
  int64_t bytes_;
  Bytes memory_;
  int64_t begin_;
};

struct Case {
  Direction direction = Direction::kPack;
  DType flat_type = DType::kF32;
  DType outside_type = DType::kF32;
  double scale = 1.0;
  int64_t flat_misalignment = 0;  // bytes
  std::vector<int64_t> numels;
  std::vector<int64_t> gaps;           // elements of flat memory before each piece
  std::vector<int64_t> misalignments;  // of each tensor, in bytes
  Schedule schedule = {};
  uint32_t seed = 1;

  std::string describe() const {
    return testing::line_of("direction ", static_cast<int>(direction), ", flat type ", static_cast<int>(flat_type),
                            ", outside type ", static_cast<int>(outside_type), ", scale ", scale, ", ", numels.size(),
                            " pieces, seed ", seed);
  }
};

void check_case(const Case& c) {
  const bool pack = c.direction == Direction::kPack;
  std::vector<Tensor> tensors;
  std::vector<DevicePiece> pieces;
  int64_t flat_numel = 0;
  for (size_t i = 0; i < c.numels.size(); ++i) {
    tensors.emplace_back(c.outside_type, c.numels[i], c.misalignments[i]);
    flat_numel += c.gaps[i];
    pieces.push_back({nullptr, flat_numel, c.numels[i]});
    flat_numel += c.numels[i];
  }
  Tensor flat(c.flat_type, flat_numel, c.flat_misalignment);
  for (size_t i = 0; i < pieces.size(); ++i) pieces[i].outside = tensors[i].data();

  // Sources hold numbers, destinations a pattern that differs from the result.
  const auto fill = [&](Tensor& tensor, DType dtype, int64_t numel, bool is_source, size_t salt) {
    tensor.set(is_source ? reference::random_elements(dtype, numel, c.seed + static_cast<uint32_t>(salt))
                         : Bytes(static_cast<size_t>(tensor.bytes()), 0x5A));
  };
  fill(flat, c.flat_type, flat_numel, !pack, 0);
  for (size_t i = 0; i < tensors.size(); ++i) fill(tensors[i], c.outside_type, c.numels[i], pack, i);
  Bytes expected_flat = flat.get();
  std::vector<Bytes> expected_tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    expected_tensors.push_back(tensors[i].get());
    unsigned char* in_flat = expected_flat.data() + pieces[i].begin * item_size(c.flat_type);
    if (pack) {
      scale_cast(in_flat, c.flat_type, tensors[i].data(), c.outside_type, c.numels[i], c.scale);
    } else {
      scale_cast(expected_tensors[i].data(), c.outside_type, in_flat, c.flat_type, c.numels[i], c.scale);
    }
  }

  std::vector<DevicePiece> shuffled = pieces;
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(c.seed));
  const PackJob job{c.direction,    flat.data(), c.flat_type, shuffled.data(), static_cast<int64_t>(shuffled.size()),
                    c.outside_type, c.scale};

  CHECK_EQ(run(job, c.schedule) == 0 ? "" : c.describe(), "");
  CHECK_EQ(flat.get() == expected_flat ? "" : c.describe(), "");
  CHECK(flat.guards_are_whole());
  for (size_t i = 0; i < tensors.size(); ++i) {
    CHECK_EQ(tensors[i].get() == expected_tensors[i] ? "" : c.describe() + ", tensor " + std::to_string(i), "");
    CHECK(tensors[i].guards_are_whole());
  }
}

// Sizes around a vector, a row of vectors and a tile.
std::vector<int64_t> interesting_numels(DType a, DType b) {
  const int64_t tile = tile_elements(std::max(item_size(a), item_size(b)));
  return {1, 2, 3, 7, 8, 9, 15, 16, 17, 33, tile / 4, tile - 1, tile, tile + 1, tile + 40, 2 * tile + 5};
}

TEST(device_bodies_agree_with_scale_cast_for_all_types_and_sizes) {
  for (const auto& [flat_type, outside_type] : reference::float_pairs()) {
    for (const int64_t numel : interesting_numels(flat_type, outside_type)) {
      for (const double scale : {1.0, 1.0 / 3}) {
        for (const Direction direction : {Direction::kPack, Direction::kUnpack}) {
          check_case({direction, flat_type, outside_type, scale, 0, {numel}, {0}, {0}});
        }
      }
    }
  }
}

TEST(device_bodies_take_any_alignment_of_both_ends) {
  for (const auto& [flat_type, outside_type] : reference::float_pairs()) {
    for (int64_t in_flat = 0; in_flat < 16; in_flat += item_size(flat_type)) {
      for (int64_t outside = 0; outside < 16; outside += item_size(outside_type)) {
        const int64_t numel = (in_flat + outside) % 3 == 0 ? 5000 : 61;
        check_case({Direction::kPack, flat_type, outside_type, 0.3, in_flat, {numel}, {0}, {outside}});
      }
    }
  }
}

TEST(device_bodies_copy_opaque_words_of_any_size_and_alignment) {
  for (const DType dtype : {DType::kU8, DType::kI16, DType::kI32, DType::kI64}) {
    for (const int64_t numel : interesting_numels(dtype, dtype)) {
      for (int64_t in_flat = 0; in_flat < 16; in_flat += item_size(dtype)) {
        for (const int64_t outside : {int64_t{0}, 8 - item_size(dtype), int64_t{8}}) {
          check_case({Direction::kPack, dtype, dtype, 1.0, in_flat, {numel}, {0}, {outside}});
        }
      }
    }
  }
}

DType random_float(std::mt19937& random) { return kFloatTypes[random() % 4]; }

int64_t random_numel(std::mt19937& random, int64_t tile) {
  switch (random() % 8) {
    case 0: return 0;
    case 1: return 1;
    case 2: return static_cast<int64_t>(random() % static_cast<uint32_t>(3 * tile));
    case 3: return tile * static_cast<int64_t>(1 + random() % 2) + static_cast<int64_t>(random() % 5) - 2;
    default: return static_cast<int64_t>(random() % 100);
  }
}

Case random_case(uint32_t seed) {
  std::mt19937 random(seed);
  constexpr double kScales[] = {1.0, 0.5, 1.0 / 3, 1e-5, 3e4};
  Case c;
  c.seed = seed;
  c.direction = random() % 2 == 0 ? Direction::kPack : Direction::kUnpack;
  c.flat_type = random_float(random);
  c.outside_type = random() % 2 == 0 ? c.flat_type : random_float(random);
  c.scale = kScales[random() % std::size(kScales)];
  if (random() % 6 == 0) {
    c.flat_type = c.outside_type = static_cast<DType>(4 + random() % 4);
    c.scale = 1.0;
  }
  const int64_t flat_size = item_size(c.flat_type);
  const int64_t outside_size = item_size(c.outside_type);
  c.flat_misalignment = static_cast<int64_t>(random() % 16) / flat_size * flat_size;
  c.schedule.backwards = random() % 2 == 0;
  if (random() % 2 == 0) c.schedule.max_blocks = 1 + static_cast<int64_t>(random() % 7);
  const int64_t num_pieces = static_cast<int64_t>(random() % 12);
  for (int64_t i = 0; i < num_pieces; ++i) {
    c.numels.push_back(random_numel(random, tile_elements(std::max(flat_size, outside_size))));
    c.gaps.push_back(static_cast<int64_t>(random() % 3 == 0 ? random() % 20 : 0));
    c.misalignments.push_back(static_cast<int64_t>(random() % 16) / outside_size * outside_size);
  }
  return c;
}

TEST(device_bodies_agree_with_scale_cast_in_random_cases) {
  for (uint32_t seed = 1; seed <= 400; ++seed) check_case(random_case(seed));
}

TEST(a_huge_tensor_among_tiny_ones_and_more_than_one_launch) {
  for (const int64_t num_pieces : {kFewPieces - 1, kFewPieces, kFewPieces + 1, kSomePieces, kSomePieces + 1, kMaxPieces,
                                   kMaxPieces + 1, kMaxPieces + kFewPieces + 1}) {
    Case c;
    c.outside_type = DType::kF16;
    c.scale = 0.25;
    c.schedule.max_blocks = num_pieces % 2 == 0 ? 100 : static_cast<int64_t>(kMaxBlocks);
    for (int64_t i = 0; i < num_pieces; ++i) {
      c.numels.push_back(i == num_pieces / 2 ? 100'000 : i % 11);
      c.gaps.push_back(i % 7 == 0 ? 1 : 0);
      c.misalignments.push_back(i % 5 * 2);
    }
    check_case(c);
  }
}

// An element that is handled twice is scaled twice.
TEST(device_bodies_work_in_place) {
  for (const DType dtype : kFloatTypes) {
    for (const double scale : {0.5, 1.0}) {
      for (const int64_t numel : interesting_numels(dtype, dtype)) {
        for (int64_t misalignment = 0; misalignment < 16; misalignment += item_size(dtype)) {
          const Bytes elements = reference::random_elements(dtype, numel, 17);
          Tensor flat(dtype, numel, misalignment);
          flat.set(elements);
          Bytes expected(elements.size());
          scale_cast(expected.data(), dtype, elements.data(), dtype, numel, scale);
          const int64_t half = numel / 2;
          const DevicePiece pieces[] = {{flat.data(), 0, half},
                                        {flat.data() + half * item_size(dtype), half, numel - half}};
          CHECK_EQ(run({Direction::kPack, flat.data(), dtype, pieces, 2, dtype, scale}), 0);
          CHECK(flat.get() == expected);
          CHECK(flat.guards_are_whole());
        }
      }
    }
  }
}

TEST(every_16_bit_number_and_nan_goes_through_the_device_bodies_as_through_the_cpu) {
  for (const DType src_type : {DType::kF16, DType::kBF16}) {
    std::vector<uint16_t> source = reference::all_halves();
    for (const DType dst_type : kFloatTypes) {
      for (const double scale : {1.0, 1.0 / 3, 7e-4}) {
        Bytes expected(static_cast<size_t>(65536 * item_size(dst_type)));
        scale_cast(expected.data(), dst_type, source.data(), src_type, 65536, scale);
        Tensor flat(dst_type, 65536, 0);
        const DevicePiece piece{source.data(), 0, 65536};
        CHECK_EQ(run({Direction::kPack, flat.data(), dst_type, &piece, 1, src_type, scale}), 0);
        CHECK(flat.get() == expected);
      }
    }
  }
}

TEST(nothing_to_do_is_fine) {
  const DevicePiece empty{nullptr, 3, 0};
  for (const int64_t count : {0, 1}) {
    CHECK_EQ(run({Direction::kPack, nullptr, DType::kF32, &empty, count, DType::kF32, 0.5}), 0);
  }
}

// Only address space: untouched pages take no memory.
unsigned char* reserve(int64_t bytes) {
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<unsigned char*>(memory);
}

TEST(the_last_tile_beyond_two_to_the_32_elements) {
  constexpr int64_t kNumel = (int64_t{1} << 32) + 40'003;
  unsigned char* src = reserve(kNumel * 2);
  unsigned char* dst = reserve(kNumel * 2);
  CHECK(src != nullptr && dst != nullptr);
  if (src == nullptr || dst == nullptr) return;
  const uint16_t one_half = 0x3800;
  const uint16_t one = 0x3C00;
  std::memcpy(src + (kNumel - 1) * 2, &one, 2);
  const DevicePiece piece{src, 0, kNumel};
  const PackJob job{Direction::kPack, dst, DType::kF16, &piece, 1, DType::kF16, 0.5};
  const int error = for_each_launch(job, [&](auto& table, uint32_t num_blocks) {
    CHECK_EQ(num_blocks, kMaxBlocks);
    CHECK_EQ(table.first_tile[1], (kNumel + 8191) / 8192);
    // As many blocks as tiles, so the last block has only the last tile.
    const uint32_t num_tiles = table.first_tile[1];
    for (int thread = 0; thread < kThreads; ++thread) {
      Pack<DType::kF16, DType::kF16>::run_thread(table, num_tiles, num_tiles - 1, thread);
    }
    return 0;
  });
  CHECK_EQ(error, 0);
  CHECK_EQ(std::memcmp(dst + (kNumel - 1) * 2, &one_half, 2), 0);
  munmap(src, static_cast<size_t>(kNumel * 2));
  munmap(dst, static_cast<size_t>(kNumel * 2));
}

}  // namespace
}  // namespace torchddp::kernels::device
