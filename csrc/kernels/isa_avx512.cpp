// AVX-512 kernels.
#if defined(__x86_64__)

#define TDDP_TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")))

// GCC's own intrinsics start from a deliberately uninitialized register, and GCC 12 warns about it (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "kernels/isa_table.h"

namespace torchddp::kernels {
namespace {

// Sixteen floats: loads that widen, stores that round, both masked.
struct Avx512Floats {
  using Mask = __mmask16;
  static constexpr Mask kAll = static_cast<Mask>(~Mask{0});

  template <DType Src>
  static TDDP_INLINE __m512 load(const unsigned char* src, Mask lanes = kAll) {
    if constexpr (Src == DType::kF32) return _mm512_maskz_loadu_ps(lanes, src);
    const __m256i halves = _mm256_maskz_loadu_epi16(lanes, src);
    if constexpr (Src == DType::kF16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }

  // Sixteen bfloat16, rounded as in float_to_bf16.
  static TDDP_INLINE __m256i round_to_bf16(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i upper = _mm512_srli_epi32(bits, 16);
    const __m512i bias = _mm512_add_epi32(_mm512_and_si512(upper, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const Mask is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40)));
  }

  template <DType Dst>
  static TDDP_INLINE void store(unsigned char* dst, __m512 value, Mask lanes = kAll) {
    if constexpr (Dst == DType::kF32) {
      _mm512_mask_storeu_ps(dst, lanes, value);
    } else if constexpr (Dst == DType::kF16) {
      _mm256_mask_storeu_epi16(dst, lanes, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    } else {
      _mm256_mask_storeu_epi16(dst, lanes, round_to_bf16(value));
    }
  }
};

// Eight doubles.
struct Avx512Doubles {
  using Mask = __mmask8;
  static constexpr Mask kAll = static_cast<Mask>(~Mask{0});

  template <DType Src>
  static TDDP_INLINE __m512d load(const unsigned char* src, Mask lanes = kAll) {
    if constexpr (Src == DType::kF64) return _mm512_maskz_loadu_pd(lanes, src);
    if constexpr (Src == DType::kF32) return _mm512_cvtps_pd(_mm256_maskz_loadu_ps(lanes, src));
    const __m128i halves = _mm_maskz_loadu_epi16(lanes, src);
    if constexpr (Src == DType::kF16) return _mm512_cvtps_pd(_mm256_cvtph_ps(halves));
    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)));
  }

  template <DType Dst>
  static TDDP_INLINE void store(unsigned char* dst, __m512d value, Mask lanes = kAll) {
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
      _mm_mask_storeu_epi16(dst, lanes, _mm256_castsi256_si128(Avx512Floats::round_to_bf16(twice)));
    }
  }
};

struct Avx512 : Vectors<64>, Avx512Floats {
  static constexpr bool kHasVectorHalves = true;
  static constexpr int kUnit = 1;

  // The tail is masked, so any number of elements takes the same path.
  template <DType Dst, DType Src>
  TDDP_TARGET static void scale_cast(void* dst_data, const void* src_data, int64_t numel, double scale) {
    using T = Product<Dst, Src>;
    using Math = std::conditional_t<std::is_same_v<T, double>, Avx512Doubles, Avx512Floats>;
    constexpr auto kStep = kBytes / static_cast<int64_t>(sizeof(T));
    constexpr int64_t kDstBytes = item_size(Dst);
    constexpr int64_t kSrcBytes = item_size(Src);
    auto* dst = static_cast<unsigned char*>(dst_data);
    const auto* src = static_cast<const unsigned char*>(src_data);
    const T factor = static_cast<T>(scale);
    int64_t i = 0;
    for (; i + kStep <= numel; i += kStep) {
      Math::template store<Dst>(dst + i * kDstBytes, Math::template load<Src>(src + i * kSrcBytes) * factor);
    }
    if (i == numel) return;
    const auto lanes = static_cast<typename Math::Mask>((1u << (numel - i)) - 1u);
    Math::template store<Dst>(dst + i * kDstBytes, Math::template load<Src>(src + i * kSrcBytes, lanes) * factor,
                              lanes);
  }

  static TDDP_INLINE bool any_top_bit(Words32 words) { return _mm512_movepi32_mask((__m512i)words) != 0; }
  static TDDP_INLINE bool any_top_bit(Words64 words) { return _mm512_movepi64_mask((__m512i)words) != 0; }

  static TDDP_INLINE Words64 multiply_halves(Words64 words) {
    const __m512i value = (__m512i)words;
    return (Words64)_mm512_mul_epu32(value, _mm512_srli_epi64(value, 32));
  }
  static TDDP_INLINE Words64 swap_neighbors(Words64 words) {
    return (Words64)_mm512_shuffle_epi32((__m512i)words, static_cast<_MM_PERM_ENUM>(0x4E));
  }

  static TDDP_INLINE __m512i raw(Ints value) { return reinterpret_cast<__m512i>(value); }

  static TDDP_INLINE Ints larger(Ints a, Ints b) { return reinterpret_cast<Ints>(_mm512_max_epi32(raw(a), raw(b))); }
  static TDDP_INLINE uint32_t largest(Ints value) { return static_cast<uint32_t>(_mm512_reduce_max_epi32(raw(value))); }

  static TDDP_INLINE void store_bytes(unsigned char* dst, const Ints (&unit)[kUnit]) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), _mm512_cvtepi32_epi8(raw(unit[0])));
  }
  static TDDP_INLINE void load_bytes(const unsigned char* src, Ints (&unit)[kUnit]) {
    unit[0] = reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src))));
  }

  // Pairs of elements are 64-bit words here: the second one's nibble is shifted from bit 32 to bit 4, or back.
  static TDDP_INLINE void store_nibbles(unsigned char* dst, const Ints (&unit)[kUnit]) {
    const __m512i nibbles = raw(unit[0] & 15);
    const __m512i pairs = _mm512_or_si512(nibbles, _mm512_srli_epi64(nibbles, 28));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(dst), _mm512_cvtepi64_epi8(pairs));
  }
  static TDDP_INLINE void load_nibbles(const unsigned char* src, Ints (&unit)[kUnit]) {
    const __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(src)));
    unit[0] = reinterpret_cast<Ints>(_mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28))) & 15;
  }
};

}  // namespace

constinit const KernelTable avx512_kernels = make_table<Avx512>("avx512");

}  // namespace torchddp::kernels

#endif
