// A 64-bit hash of memory, to find out whether ranks hold the same bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace torchddp::kernels {

inline constexpr int kHashLanes = 8;
inline constexpr int64_t kHashStripeBytes = kHashLanes * 8;
inline constexpr int kHashStripes = 16;  // in a block
inline constexpr int64_t kHashBlockBytes = kHashStripes * kHashStripeBytes;
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

// Of a range at any alignment. About as fast as reading memory, with the same result on every instruction set. The method is
// that of XXH3 for long inputs (Yann Collet): eight lanes multiply the halves of keyed words and add each word to the
// neighboring lane, mixed every 1024 bytes, so that moved data changes the hash. A single changed word is always detected;
// other changes are missed with a probability of about 2^-64. Not secure against adversaries.
uint64_t hash_bytes(const void* data, int64_t bytes);

}  // namespace torchddp::kernels
