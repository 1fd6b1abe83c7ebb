// AVX2 + F16C kernels.
#if defined(__x86_64__)

#define TDDP_TARGET __attribute__((target("avx2,f16c")))

#include <immintrin.h>

#include "kernels/isa_table.h"

namespace torchddp::kernels {
namespace {

// Eight floats: loads that widen, stores that round.
struct Avx2Floats {
  template <DType Src>
  static TDDP_INLINE __m256 load(const unsigned char* src) {
    if constexpr (Src == DType::kF32) return _mm256_loadu_ps(reinterpret_cast<const float*>(src));
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
    if constexpr (Src == DType::kF16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }

  // Eight bfloat16, rounded as in float_to_bf16.
  static TDDP_INLINE __m128i round_to_bf16(__m256 value) {
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
  static TDDP_INLINE void store(unsigned char* dst, __m256 value) {
    if constexpr (Dst == DType::kF32) {
      _mm256_storeu_ps(reinterpret_cast<float*>(dst), value);
    } else if constexpr (Dst == DType::kF16) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), round_to_bf16(value));
    }
  }
};

// Four doubles.
struct Avx2Doubles {
  template <DType Src>
  static TDDP_INLINE __m256d load(const unsigned char* src) {
    if constexpr (Src == DType::kF64) return _mm256_loadu_pd(reinterpret_cast<const double*>(src));
    if constexpr (Src == DType::kF32) return _mm256_cvtps_pd(_mm_loadu_ps(reinterpret_cast<const float*>(src)));
    const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(src));
    if constexpr (Src == DType::kF16) return _mm256_cvtps_pd(_mm_cvtph_ps(halves));
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(halves), 16)));
  }

  template <DType Dst>
  static TDDP_INLINE void store(unsigned char* dst, __m256d value) {
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
      _mm_storel_epi64(reinterpret_cast<__m128i*>(dst), Avx2Floats::round_to_bf16(_mm256_set_m128(narrow, narrow)));
    }
  }
};

struct Avx2 : Vectors<32>, Avx2Floats {
  static constexpr bool kHasVectorHalves = true;
  static constexpr int kUnit = 4;

  template <DType Dst, DType Src>
  TDDP_TARGET static void scale_cast(void* dst_data, const void* src_data, int64_t numel, double scale) {
    using T = Product<Dst, Src>;
    using Math = std::conditional_t<std::is_same_v<T, double>, Avx2Doubles, Avx2Floats>;
    constexpr auto kStep = kBytes / static_cast<int64_t>(sizeof(T));
    constexpr int64_t kDstBytes = item_size(Dst);
    constexpr int64_t kSrcBytes = item_size(Src);
    auto* dst = static_cast<unsigned char*>(dst_data);
    const auto* src = static_cast<const unsigned char*>(src_data);
    if (numel < kStep) return scale_cast_each<Dst, Src>(dst, src, numel, scale);
    const T factor = static_cast<T>(scale);
    // The tail is one whole vector that overlaps the last one of the loop. It is read before anything is written,
    // because in place the loop overwrites its first elements.
    const int64_t last = numel - kStep;
    const auto tail = Math::template load<Src>(src + last * kSrcBytes) * factor;
    for (int64_t i = 0; i < last; i += kStep) {
      Math::template store<Dst>(dst + i * kDstBytes, Math::template load<Src>(src + i * kSrcBytes) * factor);
    }
    Math::template store<Dst>(dst + last * kDstBytes, tail);
  }

  static TDDP_INLINE bool any_top_bit(Words32 words) { return _mm256_movemask_ps((__m256)words) != 0; }
  static TDDP_INLINE bool any_top_bit(Words64 words) { return _mm256_movemask_pd((__m256d)words) != 0; }

  static TDDP_INLINE Words64 multiply_halves(Words64 words) {
    const __m256i value = (__m256i)words;
    return (Words64)_mm256_mul_epu32(value, _mm256_srli_epi64(value, 32));
  }
  static TDDP_INLINE Words64 swap_neighbors(Words64 words) {
    return (Words64)_mm256_shuffle_epi32((__m256i)words, 0x4E);
  }

  static TDDP_INLINE __m256i raw(Ints value) { return reinterpret_cast<__m256i>(value); }

  static TDDP_INLINE Ints larger(Ints a, Ints b) { return reinterpret_cast<Ints>(_mm256_max_epi32(raw(a), raw(b))); }
  static TDDP_INLINE uint32_t largest(Ints value) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(raw(value)), _mm256_extracti128_si256(raw(value), 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4E));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
  }

  // The lowest `bits` bits of each element as a byte, in order.
  template <int kMask>
  static TDDP_INLINE __m256i to_bytes(const Ints (&unit)[kUnit]) {
    const __m256i mask = _mm256_set1_epi32(kMask);
    const __m256i first =
        _mm256_packus_epi32(_mm256_and_si256(raw(unit[0]), mask), _mm256_and_si256(raw(unit[1]), mask));
    const __m256i last =
        _mm256_packus_epi32(_mm256_and_si256(raw(unit[2]), mask), _mm256_and_si256(raw(unit[3]), mask));
    // The packs work on halves of registers.
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, last), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }

  static TDDP_INLINE void store_bytes(unsigned char* dst, const Ints (&unit)[kUnit]) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), to_bytes<0xFF>(unit));
  }
  static TDDP_INLINE void load_bytes(const unsigned char* src, Ints (&unit)[kUnit]) {
    for (int j = 0; j < kUnit; ++j) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(src + j * kWidth));
      unit[j] = reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(bytes));
    }
  }

  static TDDP_INLINE void store_nibbles(unsigned char* dst, const Ints (&unit)[kUnit]) {
    // Pairs: the first and 16 times the second.
    const __m256i pairs = _mm256_maddubs_epi16(to_bytes<0x0F>(unit), _mm256_set1_epi16(0x1001));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), _mm256_castsi256_si128(bytes));
  }
  static TDDP_INLINE void load_nibbles(const unsigned char* src, Ints (&unit)[kUnit]) {
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    for (int j = 0; j < kUnit; ++j) {
      int32_t nibbles;
      std::memcpy(&nibbles, src + j * 4, sizeof(nibbles));
      unit[j] = reinterpret_cast<Ints>(_mm256_srlv_epi32(_mm256_set1_epi32(nibbles), shifts)) & 15;
    }
  }
};

}  // namespace

constinit const KernelTable avx2_kernels = make_table<Avx2>("avx2");

}  // namespace torchddp::kernels

#endif
