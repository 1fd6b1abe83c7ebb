// The portable kernels: they run on any processor and are the reference for the others. 16-byte vectors, which the baseline of
// every 64-bit processor has.
#define TDDP_TARGET
#include "kernels/isa_table.h"

namespace torchddp::kernels {
namespace {

struct Generic : Vectors<16> {
  static constexpr bool kHasVectorHalves = false;
  static constexpr int kUnit = 4;
  static constexpr int kNumel = 16;  // of a unit

  template <DType Src>
  static TDDP_INLINE Floats load(const unsigned char* src) {
    return Floats{load_as<Src, float>(src), load_as<Src, float>(src + item_size(Src)),
                  load_as<Src, float>(src + 2 * item_size(Src)), load_as<Src, float>(src + 3 * item_size(Src))};
  }

  template <DType Dst>
  static TDDP_INLINE void store(unsigned char* dst, Floats value) {
    for (int lane = 0; lane < kWidth; ++lane) store_as<Dst, float>(dst + lane * item_size(Dst), value[lane]);
  }

  template <DType Dst, DType Src>
  TDDP_TARGET static void scale_cast(void* dst, const void* src, int64_t numel, double scale) {
    scale_cast_each<Dst, Src>(static_cast<unsigned char*>(dst), static_cast<const unsigned char*>(src), numel, scale);
  }

  static TDDP_INLINE bool any_top_bit(Words32 words) {
    const auto pairs = (Words64)words;
    return ((pairs[0] | pairs[1]) & 0x8000000080000000u) != 0;
  }
  static TDDP_INLINE bool any_top_bit(Words64 words) { return (words[0] | words[1]) >> 63 != 0; }

  static TDDP_INLINE Words64 multiply_halves(Words64 words) {
    return Words64{(words[0] & 0xFFFFFFFFu) * (words[0] >> 32), (words[1] & 0xFFFFFFFFu) * (words[1] >> 32)};
  }
  static TDDP_INLINE Words64 swap_neighbors(Words64 words) { return Words64{words[1], words[0]}; }

  static TDDP_INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
  static TDDP_INLINE uint32_t largest(Ints value) {
    int32_t most = value[0];
    for (int i = 1; i < kWidth; ++i) most = value[i] > most ? value[i] : most;
    return static_cast<uint32_t>(most);
  }

  static TDDP_INLINE void store_bytes(unsigned char* dst, const Ints (&unit)[kUnit]) {
    uint32_t codes[kNumel];
    std::memcpy(codes, unit, sizeof(unit));
    for (int i = 0; i < kNumel; ++i) dst[i] = static_cast<unsigned char>(codes[i]);
  }
  static TDDP_INLINE void load_bytes(const unsigned char* src, Ints (&unit)[kUnit]) {
    int32_t codes[kNumel];
    for (int i = 0; i < kNumel; ++i) codes[i] = static_cast<signed char>(src[i]);
    std::memcpy(unit, codes, sizeof(unit));
  }

  static TDDP_INLINE void store_nibbles(unsigned char* dst, const Ints (&unit)[kUnit]) {
    uint32_t codes[kNumel];
    std::memcpy(codes, unit, sizeof(unit));
    for (int i = 0; i < kNumel; i += 2) {
      dst[i / 2] = static_cast<unsigned char>((codes[i] & 15u) | (codes[i + 1] & 15u) << 4);
    }
  }
  static TDDP_INLINE void load_nibbles(const unsigned char* src, Ints (&unit)[kUnit]) {
    int32_t codes[kNumel];
    for (int i = 0; i < kNumel; ++i) codes[i] = src[i / 2] >> (i % 2 * 4) & 15;
    std::memcpy(unit, codes, sizeof(unit));
  }
};

}  // namespace

constinit const KernelTable generic_kernels = make_table<Generic>("generic");

}  // namespace torchddp::kernels
