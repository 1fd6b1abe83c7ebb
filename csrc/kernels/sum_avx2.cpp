// AVX2 + F16C sum kernels. Whether the processor has them is decided in pack_avx2.cpp.
#if defined(__x86_64__)

#include "kernels/floats_avx2.h"

#define TDDP_SUM_TARGET TDDP_AVX2
#include "kernels/sum_body.h"

namespace torchddp::kernels {
namespace {

struct Avx2 : avx2::Floats {
  static constexpr int64_t kVectorBytes = 32;
  static constexpr bool kHasVectorHalves = true;
  typedef uint32_t Words32 __attribute__((vector_size(32)));
  typedef uint64_t Words64 __attribute__((vector_size(32)));

  static TDDP_AVX2_INLINE bool any_top_bit(Words32 words) { return _mm256_movemask_ps((__m256)words) != 0; }
  static TDDP_AVX2_INLINE bool any_top_bit(Words64 words) { return _mm256_movemask_pd((__m256d)words) != 0; }
};

}  // namespace

constinit const SumTable avx2_sums = make_sum_table<Avx2>();

}  // namespace torchddp::kernels

#endif
