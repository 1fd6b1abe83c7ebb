// AVX-512 compression kernels. Whether the processor has the instructions is decided in pack_avx512.cpp.
#if defined(__x86_64__)

#include "kernels/floats_avx512.h"

#define TDDP_COMPRESS_TARGET TDDP_AVX512
#include "kernels/compress_body.h"

namespace torchddp::kernels {
namespace {

struct Avx512 {
  static constexpr int64_t kWidth = 16;
  static constexpr int kUnit = 1;
  static constexpr __mmask16 kAll = 0xFFFF;
  typedef float Floats __attribute__((vector_size(64)));
  typedef int32_t Ints __attribute__((vector_size(64)));

  static TDDP_AVX512_INLINE __m512i raw(Ints value) { return reinterpret_cast<__m512i>(value); }

  static TDDP_AVX512_INLINE Ints larger(Ints a, Ints b) {
    return reinterpret_cast<Ints>(_mm512_max_epi32(raw(a), raw(b)));
  }
  static TDDP_AVX512_INLINE uint32_t largest(Ints value) {
    return static_cast<uint32_t>(_mm512_reduce_max_epi32(raw(value)));
  }

  static TDDP_AVX512_INLINE void store_bytes(unsigned char* dst, const Ints (&unit)[kUnit]) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), _mm512_cvtepi32_epi8(raw(unit[0])));
  }
  static TDDP_AVX512_INLINE void load_bytes(const unsigned char* src, Ints (&unit)[kUnit]) {
    unit[0] = reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src))));
  }

  // Pairs of elements are 64-bit words here: the second one's nibble is shifted from bit 32 to bit 4, or back.
  static TDDP_AVX512_INLINE void store_nibbles(unsigned char* dst, const Ints (&unit)[kUnit]) {
    const __m512i nibbles = raw(unit[0] & 15);
    const __m512i pairs = _mm512_or_si512(nibbles, _mm512_srli_epi64(nibbles, 28));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(dst), _mm512_cvtepi64_epi8(pairs));
  }
  static TDDP_AVX512_INLINE void load_nibbles(const unsigned char* src, Ints (&unit)[kUnit]) {
    const __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(src)));
    unit[0] = reinterpret_cast<Ints>(_mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28))) & 15;
  }

  static TDDP_AVX512_INLINE void store_pluses(unsigned char* dst, const Ints (&unit)[kUnit]) {
    const auto pluses = static_cast<uint16_t>(~_mm512_movepi32_mask(raw(unit[0])));
    std::memcpy(dst, &pluses, sizeof(pluses));
  }
  static TDDP_AVX512_INLINE void load_minuses(const unsigned char* src, Ints (&unit)[kUnit]) {
    uint16_t pluses;
    std::memcpy(&pluses, src, sizeof(pluses));
    const auto minuses = static_cast<__mmask16>(~pluses);
    unit[0] = reinterpret_cast<Ints>(_mm512_maskz_set1_epi32(minuses, std::numeric_limits<int32_t>::min()));
  }

  template <DType kHalf>
  static TDDP_AVX512_INLINE void store_halves(unsigned char* dst, Floats value) {
    avx512::Floats::store<kHalf>(dst, value, kAll);
  }
  template <DType kHalf>
  static TDDP_AVX512_INLINE Floats load_halves(const unsigned char* src) {
    return avx512::Floats::load<kHalf>(src, kAll);
  }
};

}  // namespace

constinit const CompressTable avx512_compress = make_compress_table<Avx512>();

}  // namespace torchddp::kernels

#endif
