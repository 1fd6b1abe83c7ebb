// The loops of the kernels that check memory, compiled for each instruction set: see isa.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/hash.h"
#include "kernels/isa.h"

namespace torchddp::kernels {
namespace {

template <class Isa>
struct HashKernel {
  using Vector = typename Isa::Words64;
  static constexpr int kWidth = Isa::kBytes / 8;
  static constexpr int kVectors = kHashLanes / kWidth;

  static TDDP_INLINE Vector load(const void* from) {
    Vector value;
    __builtin_memcpy(&value, from, sizeof(value));
    return value;
  }

  TDDP_TARGET static void run(uint64_t* lanes, const unsigned char* data, int64_t blocks) {
    Vector sums[kVectors];
    __builtin_memcpy(sums, lanes, sizeof(sums));
    for (int64_t block = 0; block < blocks; ++block) {
#pragma GCC unroll 4
      for (int stripe = 0; stripe < kHashStripes; ++stripe) {
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
          const Vector words = load(data + i * Isa::kBytes);
          const Vector keyed = words ^ load(&kHashKeys[static_cast<size_t>(stripe + i * kWidth)]);
          sums[i] += Isa::multiply_halves(keyed) + Isa::swap_neighbors(words);
        }
        data += kHashStripeBytes;
      }
      for (int i = 0; i < kVectors; ++i) {
        const Vector keys = load(&kHashKeys[static_cast<size_t>(kHashStripes + i * kWidth)]);
        sums[i] = (sums[i] ^ (sums[i] >> 47) ^ keys) * kHashPrime;
      }
    }
    __builtin_memcpy(lanes, sums, sizeof(sums));
  }
};

template <class Isa, DType Src>
struct FiniteKernel {
  using Word = Bits<item_size(Src)>;
  typedef Word Vector __attribute__((vector_size(Isa::kBytes)));
  static constexpr int64_t kWidth = Isa::kBytes / item_size(Src);
  static constexpr int kVectors = 4;  // processed together

  TDDP_TARGET static bool run(const unsigned char* data, int64_t numel) {
    constexpr Word kExponent = exponent_bits<Src>();
    Vector found[kVectors] = {};
    int64_t i = 0;
    for (; i + kVectors * kWidth <= numel; i += kVectors * kWidth) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        Vector words;
        __builtin_memcpy(&words, data + (i + j * kWidth) * item_size(Src), sizeof(words));
        found[j] |= (Vector)((words & kExponent) == kExponent);
      }
    }
    const Vector all = found[0] | found[1] | found[2] | found[3];
    uint64_t parts[Isa::kBytes / 8];
    __builtin_memcpy(parts, &all, sizeof(parts));
    uint64_t any = 0;
    for (const uint64_t part : parts) any |= part;
    for (; i < numel; ++i) {
      const Word word = load_bits<Src>(data + i * item_size(Src));
      any |= (word & kExponent) == kExponent ? 1u : 0u;
    }
    return any != 0;
  }
};

}  // namespace
}  // namespace torchddp::kernels
