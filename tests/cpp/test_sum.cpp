// Reductions over ranks: every type, operation, instruction set, size and aliasing against the reference.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "capabilities.h"
#include "check.h"
#include "kernels/kernel_table.h"
#include "kernels/sum.h"
#include "pack_reference.h"

namespace torchddp::kernels {
namespace {

using reference::Bytes;

constexpr DType kTypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kI8,
                            DType::kU8,  DType::kI16, DType::kI32, DType::kI64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax};
// With thirteen or more ranks, through a tile.
constexpr int64_t kRanks[] = {1, 2, 3, 4, 7, 12, 13, 17};
// Sizes around one vector and one unrolled step of every instruction set.
constexpr int64_t kSizes[] = {0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 64, 65, 100, 255, 257, 515};
constexpr unsigned char kCanary = 0xA5;
constexpr int64_t kCanaryBytes = 128;

// A NaN on either side wins; of equal numbers (-0 and +0), the later one does.
template <class T>
T choose(ReduceOp op, T a, T b) {
  if (a != a) return a;
  return (op == ReduceOp::kMin ? a < b : a > b) ? a : b;
}

template <class T>
T reduce_floats(ReduceOp op, T a, T b) {
  return op == ReduceOp::kSum ? a + b : choose(op, a, b);
}

// Sign-extended unless unsigned.
int64_t get_integer(const unsigned char* data, DType type, int64_t index) {
  const int64_t bytes = item_size(type);
  uint64_t value = 0;
  for (int64_t byte = bytes; byte-- > 0;) value = value << 8 | data[index * bytes + byte];
  const uint64_t sign = type == DType::kU8 ? 0 : uint64_t{1} << (8 * bytes - 1);
  return static_cast<int64_t>((value ^ sign) - sign);
}

int64_t reduce_integers(ReduceOp op, int64_t a, int64_t b) {
  const auto x = static_cast<uint64_t>(a);
  const auto y = static_cast<uint64_t>(b);
  if (op == ReduceOp::kSum) return static_cast<int64_t>(x + y);
  return choose(op, a, b);
}

// A scalar loop that doesn't change its sources.
Bytes reference_reduce(const std::vector<Bytes>& sources, DType type, ReduceOp op, int64_t numel) {
  if (sources.size() == 1) return sources[0];
  const int64_t bytes = item_size(type);
  Bytes result(static_cast<size_t>(numel * bytes));
  for (int64_t i = 0; i < numel; ++i) {
    if (!is_float(type)) {
      int64_t total = get_integer(sources[0].data(), type, i);
      for (size_t rank = 1; rank < sources.size(); ++rank) {
        total = reduce_integers(op, total, get_integer(sources[rank].data(), type, i));
      }
      for (int64_t byte = 0; byte < bytes; ++byte) {
        result[static_cast<size_t>(i * bytes + byte)] =
            static_cast<unsigned char>(static_cast<uint64_t>(total) >> (8 * byte));
      }
      continue;
    }
    double total = reference::get(sources[0].data(), type, i);
    for (size_t rank = 1; rank < sources.size(); ++rank) {
      const double next = reference::get(sources[rank].data(), type, i);
      total = type == DType::kF64
                  ? reduce_floats(op, total, next)
                  : static_cast<double>(reduce_floats(op, static_cast<float>(total), static_cast<float>(next)));
    }
    reference::set(result.data(), type, i, total);
  }
  return result;
}

std::vector<Bytes> random_sources(DType type, int64_t num_ranks, int64_t numel) {
  std::vector<Bytes> sources;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    sources.push_back(reference::random_elements(type, numel, static_cast<uint32_t>(numel * 8 + rank)));
  }
  return sources;
}

// Elements in their own memory, misaligned by `misalignment` bytes. Written memory has canaries on both sides; read-only
// memory ends with its last element, so that ASan detects reads past it.
struct Buffer {
  Buffer(const Bytes& elements, int64_t misalignment, bool is_written)
      : memory(static_cast<size_t>(kCanaryBytes + misalignment), kCanary), begin(memory.size()) {
    memory.insert(memory.end(), elements.begin(), elements.end());
    if (is_written) memory.insert(memory.end(), kCanaryBytes, kCanary);
    memory.shrink_to_fit();
    num_bytes = elements.size();
  }

  unsigned char* data() { return memory.data() + begin; }

  bool is_guarded() const {
    for (size_t i = 0; i < memory.size(); ++i) {
      if ((i < begin || i >= begin + num_bytes) && memory[i] != kCanary) return false;
    }
    return true;
  }

  Bytes memory;
  size_t begin;
  size_t num_bytes;
};

// Bit `rank % 32` of `in_place`: that source is also a destination. `num_separate` more destinations are not sources.
struct Call {
  DType type;
  ReduceOp op;
  int64_t numel;
  int64_t num_ranks;
  uint32_t in_place;
  int64_t num_separate;
  bool misaligned;
};

std::string describe(const Call& call, const char* what, int64_t at) {
  return testing::line_of(cpu_capability(), ": type ", static_cast<int>(call.type), ", op ", static_cast<int>(call.op),
                          ", numel ", call.numel, ", ranks ", call.num_ranks, ", in place ", call.in_place,
                          ", separate ", call.num_separate, ": ", what, ", element ", at);
}

void check_call(const Call& call) {
  const std::vector<Bytes> sources = random_sources(call.type, call.num_ranks, call.numel);
  const Bytes expected = reference_reduce(sources, call.type, call.op, call.numel);
  const auto is_in_place = [&](int64_t rank) { return (call.in_place >> rank % 32 & 1) != 0; };
  const auto misalignment = [&](int64_t buffer) { return call.misaligned ? (buffer * 13 + 1) % 64 : 0; };
  std::vector<Buffer> buffers;
  for (int64_t rank = 0; rank < call.num_ranks; ++rank) {
    buffers.emplace_back(sources[static_cast<size_t>(rank)], misalignment(rank), is_in_place(rank));
  }
  for (int64_t k = 0; k < call.num_separate; ++k) {
    buffers.emplace_back(Bytes(expected.size(), kCanary), misalignment(call.num_ranks + k), true);
  }
  std::vector<const void*> srcs;
  std::vector<void*> dsts;
  for (int64_t i = 0; i < static_cast<int64_t>(buffers.size()); ++i) {
    Buffer& buffer = buffers[static_cast<size_t>(i)];
    if (i < call.num_ranks) srcs.push_back(buffer.data());
    if (i >= call.num_ranks || is_in_place(i)) dsts.push_back(buffer.data());
  }
  reduce_ranks(dsts, srcs, call.type, call.op, call.numel);

  for (int64_t i = 0; i < static_cast<int64_t>(buffers.size()); ++i) {
    Buffer& buffer = buffers[static_cast<size_t>(i)];
    const bool is_source_only = i < call.num_ranks && !is_in_place(i);
    const Bytes& wanted = is_source_only ? sources[static_cast<size_t>(i)] : expected;
    const int64_t at = reference::first_difference(buffer.data(), wanted.data(), call.type, call.numel);
    CHECK_EQ(at < 0 ? "" : describe(call, is_source_only ? "source changed" : "wrong result", at), "");
    CHECK_EQ(buffer.is_guarded() ? "" : describe(call, "wrote outside", i), "");
  }
}

TEST(reduce_ranks_agrees_with_the_reference_for_all_types_operations_sizes_and_ranks) {
  for_each_capability([] {
    for (const DType type : kTypes) {
      for (const ReduceOp op : kOps) {
        for (const int64_t numel : kSizes) {
          for (const int64_t num_ranks : kRanks) {
            const uint32_t all = (1u << num_ranks) - 1;
            check_call({type, op, numel, num_ranks, 0, 1, false});
            check_call({type, op, numel, num_ranks, all, 0, false});
          }
        }
      }
    }
  });
}

// The tile has 16 KB of lanes, which are floats for 16-bit elements.
TEST(reduce_ranks_of_many_ranks_agrees_with_the_reference_around_the_tile) {
  for_each_capability([] {
    for (const DType type : kTypes) {
      const int64_t tile = 16 * 1024 / (is_float(type) ? std::max(item_size(type), int64_t{4}) : item_size(type));
      for (const int64_t numel : {tile - 1, tile, tile + 1, 2 * tile + 515}) {
        check_call({type, ReduceOp::kSum, numel, 13, 0, 1, true});
        check_call({type, ReduceOp::kSum, numel, 24, ~0u, 0, false});
      }
      for (const int64_t num_ranks : {14, 15, 16, 20, 31, 32, 33, 64, 65, 128}) {
        check_call({type, ReduceOp::kSum, 515, num_ranks, ~0u, 0, false});
        check_call({type, ReduceOp::kSum, 129, num_ranks, 0, 0, false});
        check_call({type, ReduceOp::kMax, 129, num_ranks, 0x5A5A5A5Au, 17, true});
      }
    }
  });
}

TEST(reduce_ranks_takes_any_set_of_destinations_at_any_alignment) {
  for_each_capability([] {
    for (const DType type : kTypes) {
      for (const ReduceOp op : kOps) {
        for (const int64_t numel : {1, 17, 131}) {
          for (const int64_t num_ranks : {1, 2, 3, 4}) {
            for (uint32_t in_place = 0; in_place < 1u << num_ranks; ++in_place) {
              for (const int64_t num_separate : {0, 1, 2}) {
                check_call({type, op, numel, num_ranks, in_place, num_separate, true});
              }
            }
          }
        }
      }
    }
  });
}

// Reduces the sources from element `begin` on, to separate memory.
Bytes reduced(const std::vector<Bytes>& sources, DType type, ReduceOp op, int64_t begin, int64_t numel) {
  std::vector<const void*> srcs;
  for (const Bytes& source : sources) srcs.push_back(source.data() + begin * item_size(type));
  Bytes result(static_cast<size_t>(numel * item_size(type)));
  void* const dsts[] = {result.data()};
  reduce_ranks(dsts, srcs, type, op, numel);
  return result;
}

TEST(reduce_ranks_does_not_depend_on_the_instruction_set_or_the_split) {
  constexpr int64_t kNumel = 2003;
  for (const DType type : kTypes) {
    for (const ReduceOp op : kOps) {
      for (const int64_t num_ranks : {2, 3, 8, 16}) {
        const std::vector<Bytes> sources = random_sources(type, num_ranks, kNumel);
        set_active_table(&generic_kernels);
        const Bytes whole = reduced(sources, type, op, 0, kNumel);
        for_each_capability([&] {
          for (const int64_t piece : {int64_t{1}, int64_t{7}, int64_t{64}, int64_t{999}, kNumel}) {
            Bytes actual;
            for (int64_t start = 0; start < kNumel; start += piece) {
              const Bytes part = reduced(sources, type, op, start, std::min(piece, kNumel - start));
              actual.insert(actual.end(), part.begin(), part.end());
            }
            CHECK_EQ(reference::first_difference(actual.data(), whole.data(), type, kNumel), -1);
          }
        });
      }
    }
  }
}

// The reduction of `values`, one per rank, repeated in 293 elements to cover both loop and tail.
double reduce_values(DType type, ReduceOp op, const std::vector<double>& values) {
  constexpr int64_t kNumel = 293;
  std::vector<Bytes> sources;
  for (const double value : values) {
    Bytes& source = sources.emplace_back(static_cast<size_t>(kNumel * item_size(type)));
    for (int64_t i = 0; i < kNumel; ++i) reference::set(source.data(), type, i, value);
  }
  const Bytes result = reduced(sources, type, op, 0, kNumel);
  const double first = reference::get(result.data(), type, 0);
  for (int64_t i = 1; i < kNumel; ++i) {
    const double other = reference::get(result.data(), type, i);
    CHECK(std::isnan(first) ? std::isnan(other) : first == other && std::signbit(first) == std::signbit(other));
  }
  return first;
}

TEST(a_nan_of_any_rank_reaches_the_result) {
  for_each_capability([] {
    for (const DType type : reference::kFloatTypes) {
      for (const ReduceOp op : kOps) {
        for (const size_t num_ranks : {2, 3, 5, 19}) {
          for (size_t rank = 0; rank < num_ranks; ++rank) {
            for (const double other : {1.0, -double{INFINITY}, double{INFINITY}}) {
              std::vector<double> values(num_ranks, other);
              values[rank] = NAN;
              CHECK(std::isnan(reduce_values(type, op, values)));
            }
          }
        }
      }
    }
  });
}

TEST(infinities_and_zeros_are_reduced_as_ieee_754_says) {
  for_each_capability([] {
    for (const DType type : reference::kFloatTypes) {
      using enum ReduceOp;
      CHECK_EQ(reduce_values(type, kSum, {1, INFINITY, 2}), INFINITY);
      CHECK(std::isnan(reduce_values(type, kSum, {INFINITY, 1, -INFINITY})));
      CHECK_EQ(reduce_values(type, kMin, {1, -INFINITY, 2}), -INFINITY);
      CHECK_EQ(reduce_values(type, kMax, {1, -INFINITY, 2}), 2);
      CHECK(std::signbit(reduce_values(type, kSum, {-0.0, -0.0})));
      CHECK(!std::signbit(reduce_values(type, kSum, {-0.0, 0.0})));
      for (const ReduceOp op : {kMin, kMax}) {
        CHECK(std::signbit(reduce_values(type, op, {0.0, -0.0})));
        CHECK(!std::signbit(reduce_values(type, op, {-0.0, 0.0})));
      }
    }
  });
}

TEST(sources_are_added_in_order) {
  for_each_capability([] {
    CHECK_EQ(reduce_values(DType::kF32, ReduceOp::kSum, {1e8, 1, -1e8}), 0);
    CHECK_EQ(reduce_values(DType::kF32, ReduceOp::kSum, {1e8, -1e8, 1}), 1);
    CHECK_EQ(reduce_values(DType::kF64, ReduceOp::kSum, {1e17, 1, -1e17, 3}), 3);
    std::vector<double> many(64, 1.0);  // each is lost if added after 1e8, but not before it
    many.front() = 1e8;
    CHECK_EQ(reduce_values(DType::kF32, ReduceOp::kSum, many), 1e8);
    std::swap(many.front(), many.back());
    CHECK_EQ(reduce_values(DType::kF32, ReduceOp::kSum, many), 100000064);
  });
}

TEST(sixteen_bit_floats_are_rounded_once) {
  for_each_capability([] {
    CHECK_EQ(reduce_values(DType::kF16, ReduceOp::kSum, {2048, 1, 1}), 2050);
    CHECK_EQ(reduce_values(DType::kF16, ReduceOp::kSum, {2048, 1}), 2048);  // a tie, to even
    CHECK_EQ(reduce_values(DType::kF16, ReduceOp::kSum, {2050, 1}), 2052);
    CHECK_EQ(reduce_values(DType::kF16, ReduceOp::kSum, {65504, 65504, -65504}), 65504);
    CHECK_EQ(reduce_values(DType::kF16, ReduceOp::kSum, {65504, 65504}), INFINITY);
    CHECK_EQ(reduce_values(DType::kBF16, ReduceOp::kSum, {256, 1, 1}), 258);
    CHECK_EQ(reduce_values(DType::kBF16, ReduceOp::kSum, {256, 1}), 256);
    CHECK_EQ(reduce_values(DType::kBF16, ReduceOp::kSum, {258, 1}), 260);
    std::vector<double> many(33, 1.0);
    many.front() = 256;
    CHECK_EQ(reduce_values(DType::kBF16, ReduceOp::kSum, many), 288);
  });
}

template <class T>
void check_wraps(DType type) {
  constexpr T kLowest = std::numeric_limits<T>::lowest();
  constexpr T kHighest = std::numeric_limits<T>::max();
  const std::vector<T> highest(37, kHighest);
  const std::vector<T> ones(37, 1);
  const void* const srcs[] = {highest.data(), ones.data()};
  std::vector<T> result(37);
  void* const dsts[] = {result.data()};
  reduce_ranks(dsts, srcs, type, ReduceOp::kSum, 37);
  CHECK(result == std::vector<T>(37, kLowest));
}

TEST(integers_wrap) {
  for_each_capability([] {
    check_wraps<int8_t>(DType::kI8);
    check_wraps<uint8_t>(DType::kU8);
    check_wraps<int16_t>(DType::kI16);
    check_wraps<int32_t>(DType::kI32);
    check_wraps<int64_t>(DType::kI64);
  });
}

TEST(one_source_is_copied_bit_for_bit) {
  for_each_capability([] {
    const std::vector<uint32_t> source(37, 0x7F800001);  // a signaling NaN, which arithmetic would quiet
    std::vector<uint32_t> result(37);
    std::vector<uint32_t> in_place = source;
    void* const dsts[] = {result.data(), in_place.data()};
    const void* const srcs[] = {in_place.data()};
    reduce_ranks(dsts, srcs, DType::kF32, ReduceOp::kSum, 37);
    CHECK(result == source);
    CHECK(in_place == source);
  });
}

TEST(a_reduction_needs_sources_but_no_elements_and_no_destinations) {
  float value = 3;
  void* const dsts[] = {&value, nullptr};
  const void* const srcs[] = {&value, &value};
  CHECK_THROWS(std::invalid_argument, reduce_ranks(dsts, {}, DType::kF32, ReduceOp::kSum, 1), "at least one source");
  const void* const nowhere[] = {nullptr, nullptr};
  for_each_capability([&] {
    for (const DType type : kTypes) reduce_ranks(dsts, nowhere, type, ReduceOp::kSum, 0);
    reduce_ranks({}, srcs, DType::kF32, ReduceOp::kSum, 1);
  });
  CHECK_EQ(value, 3.f);
}

TEST(scaled_sums_are_those_of_sources_scaled_beforehand) {
  for_each_capability([] {
    for (const auto type : {DType::kF64, DType::kF32}) {
      for (const auto ranks : kRanks) {
        for (const auto numel : kSizes) {
          const auto bytes = static_cast<size_t>(numel * item_size(type));
          std::vector<Bytes> sources, scaled;
          std::vector<double> scales;
          std::vector<const void*> srcs;
          for (int64_t rank = 0; rank < ranks; ++rank) {
            Bytes& source = sources.emplace_back(bytes);
            for (int64_t i = 0; i < numel; ++i) {
              reference::set(source.data(), type, i, static_cast<double>((i * 37 + rank * 101) % 97) / 7.0 - 5.0);
            }
            scales.push_back(rank == 1 ? 1.0 : 1.0 / static_cast<double>(ranks));
            scaled.emplace_back(bytes);
            scale_cast(scaled.back().data(), type, source.data(), type, numel, scales.back());
          }
          for (const auto& source : sources) srcs.push_back(source.data());
          const Bytes want = reduced(scaled, type, ReduceOp::kSum, 0, numel);
          Bytes first(bytes), second(bytes);
          void* const dsts[] = {first.data(), second.data()};
          CHECK(!reduce_ranks(dsts, srcs, type, ReduceOp::kSum, numel, scales));
          CHECK(first == want && second == want);
        }
      }
    }
  });
  const float source = 1.0F;
  const void* const sources[] = {&source};
  const double scales[] = {0.5, 0.5};
  const std::span<const double> one(scales, 1);
  CHECK_THROWS(std::invalid_argument, reduce_ranks({}, sources, DType::kF32, ReduceOp::kSum, 1, scales), "one factor");
  CHECK_THROWS(std::invalid_argument, reduce_ranks({}, sources, DType::kBF16, ReduceOp::kSum, 1, one), "scaled");
  CHECK_THROWS(std::invalid_argument, reduce_ranks({}, sources, DType::kF32, ReduceOp::kMax, 1, one), "scaled");
}

}  // namespace
}  // namespace torchddp::kernels
