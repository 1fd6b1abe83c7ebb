// Sixteen floats, or eight doubles, in an AVX-512 register: loads that widen, stores that round, both masked. Shared by the
// kernels; empty on other processors. Only functions marked TDDP_AVX512_INLINE hold AVX-512 instructions.
#pragma once

#if defined(__x86_64__)

// GCC's own intrinsics start from a deliberately uninitialized register, and GCC 12 warns about it (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "kernels/dtype.h"

#define TDDP_AVX512_SET "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"
#define TDDP_AVX512 __attribute__((target(TDDP_AVX512_SET)))
#define TDDP_AVX512_INLINE __attribute__((target(TDDP_AVX512_SET), always_inline)) inline

namespace torchddp::kernels::avx512 {

struct Floats {
  static constexpr int64_t kWidth = 16;
  using Vector = __m512;
  using Mask = __mmask16;

  static TDDP_AVX512_INLINE Vector broadcast(double scale) { return _mm512_set1_ps(static_cast<float>(scale)); }
  static TDDP_AVX512_INLINE Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }

  template <DType Src>
  static TDDP_AVX512_INLINE Vector load(const unsigned char* src, Mask lanes) {
    if constexpr (Src == DType::kF32) return _mm512_maskz_loadu_ps(lanes, src);
    const __m256i halves = _mm256_maskz_loadu_epi16(lanes, src);
    if constexpr (Src == DType::kF16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }

  // Sixteen bfloat16, rounded as in float_to_bf16.
  static TDDP_AVX512_INLINE __m256i round_to_bf16(Vector value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i upper = _mm512_srli_epi32(bits, 16);
    const __m512i bias = _mm512_add_epi32(_mm512_and_si512(upper, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const Mask is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40)));
  }

  template <DType Dst>
  static TDDP_AVX512_INLINE void store(unsigned char* dst, Vector value, Mask lanes) {
    if constexpr (Dst == DType::kF32) {
      _mm512_mask_storeu_ps(dst, lanes, value);
    } else if constexpr (Dst == DType::kF16) {
      _mm256_mask_storeu_epi16(dst, lanes, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    } else {
      _mm256_mask_storeu_epi16(dst, lanes, round_to_bf16(value));
    }
  }
};

// Eight products in double.
struct Doubles {
  static constexpr int64_t kWidth = 8;
  using Vector = __m512d;
  using Mask = __mmask8;

  static TDDP_AVX512_INLINE Vector broadcast(double scale) { return _mm512_set1_pd(scale); }
  static TDDP_AVX512_INLINE Vector multiply(Vector a, Vector b) { return _mm512_mul_pd(a, b); }

  template <DType Src>
  static TDDP_AVX512_INLINE Vector load(const unsigned char* src, Mask lanes) {
    if constexpr (Src == DType::kF64) return _mm512_maskz_loadu_pd(lanes, src);
    if constexpr (Src == DType::kF32) return _mm512_cvtps_pd(_mm256_maskz_loadu_ps(lanes, src));
    const __m128i halves = _mm_maskz_loadu_epi16(lanes, src);
    if constexpr (Src == DType::kF16) return _mm512_cvtps_pd(_mm256_cvtph_ps(halves));
    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)));
  }

  template <DType Dst>
  static TDDP_AVX512_INLINE void store(unsigned char* dst, Vector value, Mask lanes) {
    if constexpr (Dst == DType::kF64) {
      _mm512_mask_storeu_pd(dst, lanes, value);
      return;
    }
    const __m256 narrow = _mm512_cvtpd_ps(value);
    if constexpr (Dst == DType::kF32) {
      _mm256_mask_storeu_ps(dst, lanes, narrow);
    } else if constexpr (Dst == DType::kF16) {
      _mm_mask_storeu_epi16(dst, lanes, _mm256_cvtps_ph(narrow, _MM_FROUND_TO_NEAREST_INT));
    } else if constexpr (Dst == DType::kBF16) {
      const __m512 twice = _mm512_insertf32x8(_mm512_zextps256_ps512(narrow), narrow, 1);
      _mm_mask_storeu_epi16(dst, lanes, _mm256_castsi256_si128(Floats::round_to_bf16(twice)));
    }
  }
};

}  // namespace torchddp::kernels::avx512

#endif
