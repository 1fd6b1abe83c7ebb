// A 64-bit hash of memory, to find out whether ranks hold the same bits.
#pragma once

#include <array>
#include <cstdint>

namespace torchddp::kernels {

inline constexpr int64_t kHashBlockBytes = 1024;

// Hashes what it is given piece by piece, as one range of bytes. About as fast as memory is read, and the same on every instruction
// set. The method is that of XXH3 for long inputs (Yann Collet): eight lanes that multiply the halves of keyed words and add each word
// to the neighbour's lane, mixed every 1024 bytes, so that what changes its place changes the hash. One changed word is always noticed;
// of other changes one in about 2^64 is not. Not for adversaries.
class Hash {
 public:
  Hash();
  // Only the last piece may have a length that is not a multiple of kHashBlockBytes.
  void add(const void* data, int64_t bytes);
  uint64_t finish() const;

 private:
  std::array<uint64_t, 8> lanes_;
  uint64_t bytes_ = 0;
};

// The hash of one range, at any alignment.
uint64_t hash_bytes(const void* data, int64_t bytes);

}  // namespace torchddp::kernels
