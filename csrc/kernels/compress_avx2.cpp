// AVX2 + F16C compression kernels. Whether the processor has them is decided in pack_avx2.cpp.
#if defined(__x86_64__)

#include "kernels/floats_avx2.h"

#define TDDP_COMPRESS_TARGET TDDP_AVX2
#include "kernels/compress_body.h"

namespace torchddp::kernels {
namespace {

struct Avx2 {
  static constexpr int64_t kWidth = 8;
  static constexpr int kUnit = 4;
  typedef float Floats __attribute__((vector_size(32)));
  typedef int32_t Ints __attribute__((vector_size(32)));

  static TDDP_AVX2_INLINE __m256i raw(Ints value) { return reinterpret_cast<__m256i>(value); }

  static TDDP_AVX2_INLINE Ints larger(Ints a, Ints b) {
    return reinterpret_cast<Ints>(_mm256_max_epi32(raw(a), raw(b)));
  }
  static TDDP_AVX2_INLINE uint32_t largest(Ints value) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(raw(value)), _mm256_extracti128_si256(raw(value), 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4E));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
  }

  // The lowest `bits` bits of each element as a byte, in order.
  template <int kMask>
  static TDDP_AVX2_INLINE __m256i to_bytes(const Ints (&unit)[kUnit]) {
    const __m256i mask = _mm256_set1_epi32(kMask);
    const __m256i first =
        _mm256_packus_epi32(_mm256_and_si256(raw(unit[0]), mask), _mm256_and_si256(raw(unit[1]), mask));
    const __m256i last =
        _mm256_packus_epi32(_mm256_and_si256(raw(unit[2]), mask), _mm256_and_si256(raw(unit[3]), mask));
    // The packs work on halves of registers.
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, last), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }

  static TDDP_AVX2_INLINE void store_bytes(unsigned char* dst, const Ints (&unit)[kUnit]) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), to_bytes<0xFF>(unit));
  }
  static TDDP_AVX2_INLINE void load_bytes(const unsigned char* src, Ints (&unit)[kUnit]) {
    for (int j = 0; j < kUnit; ++j) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(src + j * kWidth));
      unit[j] = reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(bytes));
    }
  }

  static TDDP_AVX2_INLINE void store_nibbles(unsigned char* dst, const Ints (&unit)[kUnit]) {
    // Pairs: the first and 16 times the second.
    const __m256i pairs = _mm256_maddubs_epi16(to_bytes<0x0F>(unit), _mm256_set1_epi16(0x1001));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), _mm256_castsi256_si128(bytes));
  }
  static TDDP_AVX2_INLINE void load_nibbles(const unsigned char* src, Ints (&unit)[kUnit]) {
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    for (int j = 0; j < kUnit; ++j) {
      int32_t nibbles;
      std::memcpy(&nibbles, src + j * 4, sizeof(nibbles));
      unit[j] = reinterpret_cast<Ints>(_mm256_srlv_epi32(_mm256_set1_epi32(nibbles), shifts)) & 15;
    }
  }

  static TDDP_AVX2_INLINE void store_pluses(unsigned char* dst, const Ints (&unit)[kUnit]) {
    for (int j = 0; j < kUnit; ++j) {
      dst[j] = static_cast<unsigned char>(~_mm256_movemask_ps(reinterpret_cast<__m256>(unit[j])));
    }
  }
  static TDDP_AVX2_INLINE void load_minuses(const unsigned char* src, Ints (&unit)[kUnit]) {
    const __m256i shifts = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    for (int j = 0; j < kUnit; ++j) {
      const __m256i minuses = _mm256_set1_epi32(~static_cast<int32_t>(src[j]));
      unit[j] = reinterpret_cast<Ints>(_mm256_sllv_epi32(minuses, shifts)) & std::numeric_limits<int32_t>::min();
    }
  }

  template <DType kHalf>
  static TDDP_AVX2_INLINE void store_halves(unsigned char* dst, Floats value) {
    avx2::Floats::store<kHalf>(dst, value);
  }
  template <DType kHalf>
  static TDDP_AVX2_INLINE Floats load_halves(const unsigned char* src) {
    return avx2::Floats::load<kHalf>(src);
  }
};

}  // namespace

constinit const CompressTable avx2_compress = make_compress_table<Avx2>();

}  // namespace torchddp::kernels

#endif
