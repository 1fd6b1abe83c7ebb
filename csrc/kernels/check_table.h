// Inside of the kernels that check memory (hash.h, non_finite.h): one table per instruction set, reached through its KernelTable. Not
// for use outside kernels/ and its tests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/hash.h"

namespace torchddp::kernels {

inline constexpr int kHashLanes = 8;
inline constexpr int64_t kHashStripeBytes = kHashLanes * 8;
inline constexpr int kHashStripes = 16;  // in a block
static_assert(kHashStripes * kHashStripeBytes == kHashBlockBytes);
inline constexpr uint64_t kHashPrime = 0x9E3779B1u;

// The bijection of splitmix64.
constexpr uint64_t mix_bits(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

// Stripe s of a block takes kHashKeys[s .. s + 7], the mixing after the block the last eight.
inline constexpr auto kHashKeys = [] {
  std::array<uint64_t, kHashStripes + kHashLanes> keys{};
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = mix_bits((i + 1) * 0x9E3779B97F4A7C15u);
  return keys;
}();

// Whole blocks into the lanes.
using HashBlocksFn = void (*)(uint64_t* lanes, const unsigned char* data, int64_t blocks);

// Elements between two looks at whether any was not finite.
inline constexpr int64_t kFiniteChunk = 2048;

// Whether any of up to kFiniteChunk elements is an infinity or a NaN, type and instruction set fixed.
using AnyNonFiniteFn = bool (*)(const unsigned char* data, int64_t numel);

struct CheckTable {
  HashBlocksFn hash_blocks;
  std::array<AnyNonFiniteFn, kNumFloatTypes> any_non_finite;
};

extern const CheckTable generic_checks;
// On x86-64 only.
extern const CheckTable avx2_checks;
extern const CheckTable avx512_checks;

// All bits of the exponent: of an infinity and a NaN, and of nothing else.
template <DType Src>
constexpr auto exponent_bits() {
  static_assert(is_float(Src), "opaque words have no exponent");
  if constexpr (Src == DType::kF64) return uint64_t{0x7FF0000000000000u};
  if constexpr (Src == DType::kF32) return uint32_t{0x7F800000u};
  if constexpr (Src == DType::kF16) return uint16_t{0x7C00u};
  if constexpr (Src == DType::kBF16) return uint16_t{0x7F80u};
}

}  // namespace torchddp::kernels
