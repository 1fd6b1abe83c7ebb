// The portable compression kernels: 16-byte vectors, which the baseline of every 64-bit processor has.
#define TDDP_COMPRESS_TARGET
#include "kernels/compress_body.h"

namespace torchddp::kernels {
namespace {

struct Generic {
  static constexpr int64_t kWidth = 4;
  static constexpr int kUnit = 4;
  static constexpr int kNumel = 16;
  typedef float Floats __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));

  static TDDP_ALWAYS_INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
  static TDDP_ALWAYS_INLINE uint32_t largest(Ints value) {
    int32_t most = value[0];
    for (int i = 1; i < kWidth; ++i) most = value[i] > most ? value[i] : most;
    return static_cast<uint32_t>(most);
  }

  static TDDP_ALWAYS_INLINE void store_bytes(unsigned char* dst, const Ints (&unit)[kUnit]) {
    uint32_t codes[kNumel];
    std::memcpy(codes, unit, sizeof(unit));
    for (int i = 0; i < kNumel; ++i) dst[i] = static_cast<unsigned char>(codes[i]);
  }
  static TDDP_ALWAYS_INLINE void load_bytes(const unsigned char* src, Ints (&unit)[kUnit]) {
    int32_t codes[kNumel];
    for (int i = 0; i < kNumel; ++i) codes[i] = static_cast<signed char>(src[i]);
    std::memcpy(unit, codes, sizeof(unit));
  }

  static TDDP_ALWAYS_INLINE void store_nibbles(unsigned char* dst, const Ints (&unit)[kUnit]) {
    uint32_t codes[kNumel];
    std::memcpy(codes, unit, sizeof(unit));
    for (int i = 0; i < kNumel; i += 2) {
      dst[i / 2] = static_cast<unsigned char>((codes[i] & 15u) | (codes[i + 1] & 15u) << 4);
    }
  }
  static TDDP_ALWAYS_INLINE void load_nibbles(const unsigned char* src, Ints (&unit)[kUnit]) {
    int32_t codes[kNumel];
    for (int i = 0; i < kNumel; ++i) codes[i] = src[i / 2] >> (i % 2 * 4) & 15;
    std::memcpy(unit, codes, sizeof(unit));
  }

  static TDDP_ALWAYS_INLINE void store_pluses(unsigned char* dst, const Ints (&unit)[kUnit]) {
    uint32_t values[kNumel];
    std::memcpy(values, unit, sizeof(unit));
    for (int byte = 0; byte < kNumel / 8; ++byte) {
      uint32_t pluses = 0;
      for (int bit = 0; bit < 8; ++bit) pluses |= (~values[byte * 8 + bit] >> 31) << bit;
      dst[byte] = static_cast<unsigned char>(pluses);
    }
  }
  static TDDP_ALWAYS_INLINE void load_minuses(const unsigned char* src, Ints (&unit)[kUnit]) {
    uint32_t minuses[kNumel];
    for (int i = 0; i < kNumel; ++i) minuses[i] = ~static_cast<uint32_t>(src[i / 8]) >> (i % 8) << 31;
    std::memcpy(unit, minuses, sizeof(unit));
  }

  template <DType kHalf>
  static TDDP_ALWAYS_INLINE void store_halves(unsigned char* dst, Floats value) {
    for (int i = 0; i < kWidth; ++i) store_as<kHalf>(dst + 2 * i, value[i]);
  }
  template <DType kHalf>
  static TDDP_ALWAYS_INLINE Floats load_halves(const unsigned char* src) {
    Floats value;
    for (int i = 0; i < kWidth; ++i) value[i] = load_as<kHalf, float>(src + 2 * i);
    return value;
  }
};

}  // namespace

constinit const CompressTable generic_compress = make_compress_table<Generic>();

}  // namespace torchddp::kernels
