// Eight floats, or four doubles, in an AVX2 register: loads that widen, stores that round. Shared by the
// kernels; empty on other processors. Only functions marked TDDP_AVX2_INLINE hold AVX2 and F16C instructions.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include "kernels/dtype.h"

#define TDDP_AVX2 __attribute__((target("avx2,f16c")))
#define TDDP_AVX2_INLINE __attribute__((target("avx2,f16c"), always_inline)) inline

namespace torchddp::kernels::avx2 {

struct Floats {
  static constexpr int64_t kWidth = 8;
  using Vector = __m256;

  static TDDP_AVX2_INLINE Vector broadcast(double scale) { return _mm256_set1_ps(static_cast<float>(scale)); }
  static TDDP_AVX2_INLINE Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }

  template <DType Src>
  static TDDP_AVX2_INLINE Vector load(const unsigned char* src) {
    if constexpr (Src == DType::kF32) return _mm256_loadu_ps(reinterpret_cast<const float*>(src));
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
    if constexpr (Src == DType::kF16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }

  // Eight bfloat16, rounded as in float_to_bf16.
  static TDDP_AVX2_INLINE __m128i round_to_bf16(Vector value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i upper = _mm256_srli_epi32(bits, 16);
    const __m256i bias = _mm256_add_epi32(_mm256_and_si256(upper, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet_nan = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(rounded, quiet_nan, is_nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }

  template <DType Dst>
  static TDDP_AVX2_INLINE void store(unsigned char* dst, Vector value) {
    if constexpr (Dst == DType::kF32) {
      _mm256_storeu_ps(reinterpret_cast<float*>(dst), value);
    } else if constexpr (Dst == DType::kF16) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), round_to_bf16(value));
    }
  }
};

// Four products in double.
struct Doubles {
  static constexpr int64_t kWidth = 4;
  using Vector = __m256d;

  static TDDP_AVX2_INLINE Vector broadcast(double scale) { return _mm256_set1_pd(scale); }
  static TDDP_AVX2_INLINE Vector multiply(Vector a, Vector b) { return _mm256_mul_pd(a, b); }

  template <DType Src>
  static TDDP_AVX2_INLINE Vector load(const unsigned char* src) {
    if constexpr (Src == DType::kF64) return _mm256_loadu_pd(reinterpret_cast<const double*>(src));
    if constexpr (Src == DType::kF32) return _mm256_cvtps_pd(_mm_loadu_ps(reinterpret_cast<const float*>(src)));
    const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(src));
    if constexpr (Src == DType::kF16) return _mm256_cvtps_pd(_mm_cvtph_ps(halves));
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(halves), 16)));
  }

  template <DType Dst>
  static TDDP_AVX2_INLINE void store(unsigned char* dst, Vector value) {
    if constexpr (Dst == DType::kF64) {
      _mm256_storeu_pd(reinterpret_cast<double*>(dst), value);
      return;
    }
    const __m128 narrow = _mm256_cvtpd_ps(value);
    if constexpr (Dst == DType::kF32) {
      _mm_storeu_ps(reinterpret_cast<float*>(dst), narrow);
    } else if constexpr (Dst == DType::kF16) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(dst), _mm_cvtps_ph(narrow, _MM_FROUND_TO_NEAREST_INT));
    } else if constexpr (Dst == DType::kBF16) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(dst), Floats::round_to_bf16(_mm256_set_m128(narrow, narrow)));
    }
  }
};

}  // namespace torchddp::kernels::avx2

#endif
