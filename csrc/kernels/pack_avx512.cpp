// AVX-512 kernels: tails are masked, so any number of elements takes the same path. Only functions marked TDDP_AVX512
// hold such instructions; the rest of the file is baseline code.
#include "kernels/pack_table.h"

#if defined(__x86_64__)

#include "kernels/floats_avx512.h"
#include "kernels/pack_scalar.h"
#include "kernels/sum_table.h"

namespace torchddp::kernels {
namespace {

using avx512::Floats;

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

template <DType Dst, DType Src>
struct Avx512Kernel {
  using Math = std::conditional_t<std::is_same_v<Product<Dst, Src>, double>, Doubles, Floats>;
  using Mask = typename Math::Mask;
  static constexpr int64_t kWidth = Math::kWidth;
  static constexpr int64_t kDstBytes = float_item_size(Dst);
  static constexpr int64_t kSrcBytes = float_item_size(Src);

  TDDP_AVX512 static void run(void* dst_data, const void* src_data, int64_t numel, double scale) {
    auto* dst = static_cast<unsigned char*>(dst_data);
    const auto* src = static_cast<const unsigned char*>(src_data);
    const auto factor = Math::broadcast(scale);
    constexpr Mask kAll = static_cast<Mask>(~Mask{0});
    int64_t i = 0;
    for (; i + kWidth <= numel; i += kWidth) {
      Math::template store<Dst>(dst + i * kDstBytes,
                                Math::multiply(Math::template load<Src>(src + i * kSrcBytes, kAll), factor), kAll);
    }
    if (i == numel) return;
    const Mask lanes = static_cast<Mask>((1u << (numel - i)) - 1u);
    Math::template store<Dst>(dst + i * kDstBytes,
                              Math::multiply(Math::template load<Src>(src + i * kSrcBytes, lanes), factor), lanes);
  }
};

constexpr KernelTable kTable = make_table<Avx512Kernel>("avx512", avx512_sums);

}  // namespace

const KernelTable* avx512_table() {
  const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                         avx2_table() != nullptr;
  return supported ? &kTable : nullptr;
}

}  // namespace torchddp::kernels

#else

namespace torchddp::kernels {
const KernelTable* avx512_table() { return nullptr; }
}  // namespace torchddp::kernels

#endif
