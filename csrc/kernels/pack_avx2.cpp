// AVX2 + F16C kernels. Only functions marked TDDP_AVX2 hold such instructions; the rest of the file is baseline code.
#include "kernels/pack_table.h"

#if defined(__x86_64__)

#include "kernels/floats_avx2.h"
#include "kernels/pack_scalar.h"
#include "kernels/sum_table.h"

namespace torchddp::kernels {
namespace {

using avx2::Floats;

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

template <DType Dst, DType Src>
struct Avx2Kernel {
  using Math = std::conditional_t<std::is_same_v<Product<Dst, Src>, double>, Doubles, Floats>;
  static constexpr int64_t kWidth = Math::kWidth;
  static constexpr int64_t kDstBytes = float_item_size(Dst);
  static constexpr int64_t kSrcBytes = float_item_size(Src);

  TDDP_AVX2 static void run(void* dst_data, const void* src_data, int64_t numel, double scale) {
    auto* dst = static_cast<unsigned char*>(dst_data);
    const auto* src = static_cast<const unsigned char*>(src_data);
    if (numel < kWidth) return scale_cast_scalar<Dst, Src>(dst, src, numel, scale);
    const auto factor = Math::broadcast(scale);
    // The tail is one whole vector that overlaps the last one of the loop. It is read before anything is written,
    // because in place the loop overwrites its first elements.
    const int64_t last = numel - kWidth;
    const auto tail = Math::multiply(Math::template load<Src>(src + last * kSrcBytes), factor);
    for (int64_t i = 0; i < last; i += kWidth) {
      Math::template store<Dst>(dst + i * kDstBytes,
                                Math::multiply(Math::template load<Src>(src + i * kSrcBytes), factor));
    }
    Math::template store<Dst>(dst + last * kDstBytes, tail);
  }
};

constexpr KernelTable kTable = make_table<Avx2Kernel>("avx2", avx2_sums);

}  // namespace

const KernelTable* avx2_table() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? &kTable : nullptr;
}

}  // namespace torchddp::kernels

#else

namespace torchddp::kernels {
const KernelTable* avx2_table() { return nullptr; }
}  // namespace torchddp::kernels

#endif
