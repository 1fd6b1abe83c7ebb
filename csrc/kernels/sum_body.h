// The loops of the sum kernels, compiled for each instruction set: see isa.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "kernels/isa.h"
#include "kernels/kernel_table.h"

namespace torchddp::kernels {
namespace {

// The numbers an operation works on. Sums of integers are formed unsigned, where wrapping is defined.
template <DType Type, ReduceOp Op>
constexpr auto lane_of() {
  constexpr bool kWraps = Op == ReduceOp::kSum;
  if constexpr (Type == DType::kF64) return double{};
  if constexpr (Type == DType::kF32 || Type == DType::kF16 || Type == DType::kBF16) return float{};
  if constexpr (Type == DType::kU8) return uint8_t{};
  if constexpr (Type == DType::kI8) return std::conditional_t<kWraps, uint8_t, int8_t>{};
  if constexpr (Type == DType::kI16) return std::conditional_t<kWraps, uint16_t, int16_t>{};
  if constexpr (Type == DType::kI32) return std::conditional_t<kWraps, uint32_t, int32_t>{};
  if constexpr (Type == DType::kI64) return std::conditional_t<kWraps, uint64_t, int64_t>{};
}

// Bits of the smallest number that is infinite when it is stored as `type`: of a double for kF64, of a float for the others, of
// which the 16-bit ones are rounded to nearest.
constexpr uint64_t least_not_finite(DType type) {
  if (type == DType::kF64) return 0x7FF0000000000000u;
  return type == DType::kF16 ? 0x477FF000u : type == DType::kBF16 ? 0x7F7F8000u : 0x7F800000u;
}

// A checked sum checks the totals while they are in registers: a total with a non-finite term is itself non-finite. So the
// sources are only checked where a total is bad, before anything is written over them.
template <class Isa, DType Type, ReduceOp Op>
struct SumKernel {
  using Lane = decltype(lane_of<Type, Op>());
  typedef Lane Vector __attribute__((vector_size(Isa::kBytes)));
  // In memory: at any address, whatever the type declared there. (GCC copies 16 bytes by memcpy through the stack.)
  typedef Lane Unaligned __attribute__((vector_size(Isa::kBytes), aligned(1), may_alias));
  static constexpr bool kIsHalf = Type == DType::kF16 || Type == DType::kBF16;
  static constexpr int64_t kItemBytes = kIsHalf ? 2 : sizeof(Lane);
  // What one vector covers in memory.
  static constexpr int64_t kStepBytes = Isa::kBytes / static_cast<int64_t>(sizeof(Lane)) * kItemBytes;
  // Enough independent chains to hide the latency of an addition, few enough to stay in registers. (Element by element
  // there is nothing to gain.)
  static constexpr int kUnroll = kIsHalf && !Isa::kHasVectorHalves ? 1 : 4;
  // Measured: see Note [Many ranks].
  static constexpr int64_t kMostAtOnce = 12;
  static constexpr int64_t kTogether = 8;
  static constexpr int64_t kTileBytes = 16 * 1024;

  static TDDP_INLINE Vector load(const unsigned char* src) {
    if constexpr (kIsHalf) {
      return Isa::template load<Type>(src);
    } else {
      return *reinterpret_cast<const Unaligned*>(src);
    }
  }

  static TDDP_INLINE void store(unsigned char* dst, Vector value) {
    if constexpr (kIsHalf) {
      Isa::template store<Type>(dst, value);
    } else {
      *reinterpret_cast<Unaligned*>(dst) = value;
    }
  }

  // `a` is the reduction so far. A NaN in `b` makes every comparison false, and so is chosen.
  static TDDP_INLINE Vector combine(Vector a, Vector b) {
    if constexpr (Op == ReduceOp::kSum) {
      return a + b;
    } else if constexpr (std::is_integral_v<Lane>) {
      return Op == ReduceOp::kMin ? (a < b ? a : b) : (a > b ? a : b);
    } else {
      return Op == ReduceOp::kMin ? ((a < b) | (a != a) ? a : b) : ((a > b) | (a != a) ? a : b);
    }
  }

  // A source, times its factor if there are factors.
  template <bool kScaled>
  static TDDP_INLINE Vector scaled(Vector value, const double* scales, int64_t rank) {
    if constexpr (kScaled) {
      return value * static_cast<Lane>(scales[rank]);
    } else {
      return value;
    }
  }

  // Whether the elements that the totals are stored as are all finite. Adding makes the sign bit of what is too large, and of
  // nothing else: the sign is cleared before, and no sum wraps.
  template <int kNum>
  static TDDP_INLINE bool all_finite(const Vector (&totals)[kNum]) {
    using Word = std::conditional_t<sizeof(Lane) == 8, uint64_t, uint32_t>;
    typedef Word Words __attribute__((vector_size(Isa::kBytes)));
    constexpr Word kSign = Word{1} << (8 * sizeof(Word) - 1);
    constexpr auto kLeast = static_cast<Word>(least_not_finite(Type));
    Words tops = {};
#pragma GCC unroll 4
    for (int j = 0; j < kNum; ++j) tops |= ((Words)totals[j] & ~kSign) + (kSign - kLeast);
    return !Isa::any_top_bit(tops);
  }

  // Of the first source, kNum vectors `at` bytes into it.
  template <bool kScaled, int kNum>
  static TDDP_INLINE void begin_with(Vector (&totals)[kNum], const void* const* srcs, const double* scales,
                                     int64_t at) {
    const auto* first = static_cast<const unsigned char*>(srcs[0]) + at;
#pragma GCC unroll 4
    for (int j = 0; j < kNum; ++j) totals[j] = scaled<kScaled>(load(first + j * kStepBytes), scales, 0);
  }

  // And of sources [begin, end).
  template <bool kScaled, int kNum>
  static TDDP_INLINE void add(Vector (&totals)[kNum], const void* const* srcs, const double* scales, int64_t begin,
                              int64_t end, int64_t at) {
    for (int64_t rank = begin; rank < end; ++rank) {
      const auto* src = static_cast<const unsigned char*>(srcs[rank]) + at;
#pragma GCC unroll 4
      for (int j = 0; j < kNum; ++j) {
        totals[j] = combine(totals[j], scaled<kScaled>(load(src + j * kStepBytes), scales, rank));
      }
    }
  }

  // The totals of all sources, before they are written.
  template <bool kChecked, int kNum>
  static TDDP_INLINE void check(const Vector (&totals)[kNum], const void* const* srcs, int64_t num_srcs, int64_t at,
                                SumFindings* found) {
    if constexpr (kChecked) {
      if (!all_finite(totals)) [[unlikely]]
        found->note(srcs, num_srcs, Type, at, kNum * kStepBytes);
    }
  }

  template <int kNum>
  static TDDP_INLINE void write(const Vector (&totals)[kNum], void* const* dsts, int64_t begin, int64_t end,
                                int64_t at) {
    for (int64_t k = begin; k < end; ++k) {
      auto* dst = static_cast<unsigned char*>(dsts[k]) + at;
#pragma GCC unroll 4
      for (int j = 0; j < kNum; ++j) store(dst + j * kStepBytes, totals[j]);
    }
  }

  // All is read before anything is written: a destination may be a source.
  template <bool kScaled, bool kChecked, int kNum>
  static TDDP_INLINE void step(void* const* dsts, int64_t num_dsts, const void* const* srcs, const double* scales,
                               int64_t num_srcs, int64_t at, SumFindings* found) {
    Vector totals[kNum];
    begin_with<kScaled>(totals, srcs, scales, at);
    add<kScaled>(totals, srcs, scales, 1, num_srcs, at);
    check<kChecked>(totals, srcs, num_srcs, at, found);
    write(totals, dsts, 0, num_dsts, at);
  }

  // Note [Many ranks]
  // A processor can follow about a dozen streams through memory, and buffers that start on a page share the same few sets of
  // the L1 cache. So the many sources of a tile are added a few at a time, with the totals kept in lanes in between, and then
  // written to a few destinations at a time. Returns how far whole steps went.
  template <bool kScaled, bool kChecked>
  static TDDP_INLINE int64_t tiles(void* const* dsts, int64_t num_dsts, const void* const* srcs, const double* scales,
                                   int64_t num_srcs, int64_t bytes, SumFindings* found) {
    constexpr int64_t kBlockBytes = kUnroll * kStepBytes;
    // In registers, for as long as the compiler knows that no store goes there: not in the tile.
    struct Block {
      Vector totals[kUnroll];
    };
    Block tile[kTileBytes / sizeof(Block)];
    int64_t start = 0;
    while (bytes - start >= kBlockBytes) {
      const int64_t blocks = std::min(std::ssize(tile), (bytes - start) / kBlockBytes);
      for (int64_t begin = 0; begin < num_srcs; begin += kTogether) {
        const int64_t end = std::min(begin + kTogether, num_srcs);
        for (int64_t i = 0; i < blocks; ++i) {
          const int64_t at = start + i * kBlockBytes;
          Block block;
          if (begin == 0) {
            begin_with<kScaled>(block.totals, srcs, scales, at);
          } else {
            block = tile[i];
          }
          add<kScaled>(block.totals, srcs, scales, std::max<int64_t>(begin, 1), end, at);
          if (end == num_srcs) check<kChecked>(block.totals, srcs, num_srcs, at, found);
          tile[i] = block;
        }
      }
      for (int64_t begin = 0; begin < num_dsts; begin += kTogether) {
        const int64_t end = std::min(begin + kTogether, num_dsts);
        for (int64_t i = 0; i < blocks; ++i) {
          const Block block = tile[i];
          write(block.totals, dsts, begin, end, start + i * kBlockBytes);
        }
      }
      start += blocks * kBlockBytes;
    }
    return start;
  }

  // Loads less than a vector by way of a whole one.
  static TDDP_INLINE Vector load_part(const unsigned char* src, int64_t bytes) {
    unsigned char whole[kStepBytes] = {};
    std::memcpy(whole, src, static_cast<size_t>(bytes));
    return load(whole);
  }

  template <bool kScaled, bool kChecked>
  static TDDP_INLINE void last_step(void* const* dsts, int64_t num_dsts, const void* const* srcs, const double* scales,
                                    int64_t num_srcs, int64_t at, int64_t bytes, SumFindings* found) {
    const auto part = [&](int64_t rank) TDDP_TARGET {
      return scaled<kScaled>(load_part(static_cast<const unsigned char*>(srcs[rank]) + at, bytes), scales, rank);
    };
    Vector total[] = {part(0)};
    for (int64_t rank = 1; rank < num_srcs; ++rank) total[0] = combine(total[0], part(rank));
    if constexpr (kChecked) {
      if (!all_finite(total)) [[unlikely]]
        found->note(srcs, num_srcs, Type, at, bytes);
    }
    unsigned char whole[kStepBytes];
    store(whole, total[0]);
    for (int64_t k = 0; k < num_dsts; ++k) {
      std::memcpy(static_cast<unsigned char*>(dsts[k]) + at, whole, static_cast<size_t>(bytes));
    }
  }

  template <bool kScaled, bool kChecked>
  static TDDP_INLINE void loop(void* const* dsts, int64_t num_dsts, const void* const* srcs, const double* scales,
                               int64_t num_srcs, int64_t bytes, SumFindings* found) {
    int64_t at =
        num_srcs > kMostAtOnce ? tiles<kScaled, kChecked>(dsts, num_dsts, srcs, scales, num_srcs, bytes, found) : 0;
    for (; at + kUnroll * kStepBytes <= bytes; at += kUnroll * kStepBytes) {
      step<kScaled, kChecked, kUnroll>(dsts, num_dsts, srcs, scales, num_srcs, at, found);
    }
    for (; at + kStepBytes <= bytes; at += kStepBytes) {
      step<kScaled, kChecked, 1>(dsts, num_dsts, srcs, scales, num_srcs, at, found);
    }
    if (at < bytes) {
      last_step<kScaled, kChecked>(dsts, num_dsts, srcs, scales, num_srcs, at, bytes - at, found);
    }
  }

  // `scales` and `found` are only read if scaled and checked.
  template <bool kScaled, bool kChecked>
  TDDP_TARGET static void run(void* const* dsts, int64_t num_dsts, const void* const* srcs, const double* scales,
                              int64_t num_srcs, int64_t numel, SumFindings* found) {
    static_assert(!kChecked || (Op == ReduceOp::kSum && !std::is_integral_v<Lane>),
                  "nothing else passes on what is not finite");
    const int64_t bytes = numel * kItemBytes;
    // Two ranks: with the counts known and the pointers in locals, the compiler unrolls the loops over ranks.
    if constexpr (Op == ReduceOp::kSum && kUnroll > 1) {
      if (num_srcs == 2 && (num_dsts == 1 || num_dsts == 2)) {
        const void* const two_srcs[] = {srcs[0], srcs[1]};
        void* const two_dsts[] = {dsts[0], dsts[num_dsts - 1]};
        const double two_scales[] = {kScaled ? scales[0] : 1.0, kScaled ? scales[1] : 1.0};
        return num_dsts == 1 ? loop<kScaled, kChecked>(two_dsts, 1, two_srcs, two_scales, 2, bytes, found)
                             : loop<kScaled, kChecked>(two_dsts, 2, two_srcs, two_scales, 2, bytes, found);
      }
    }
    loop<kScaled, kChecked>(dsts, num_dsts, srcs, scales, num_srcs, bytes, found);
  }
};

}  // namespace
}  // namespace torchddp::kernels
