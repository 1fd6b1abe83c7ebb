// AVX2 kernels that check memory. Whether the processor has them is decided in pack_avx2.cpp.
#if defined(__x86_64__)

#include "kernels/floats_avx2.h"

#define TDDP_CHECKS_TARGET TDDP_AVX2
#include "kernels/checks_body.h"

namespace torchddp::kernels {
namespace {

struct Avx2 {
  static constexpr int kBytes = 32;
  typedef uint64_t Words __attribute__((vector_size(32)));

  static TDDP_AVX2_INLINE Words multiply_halves(Words words) {
    const __m256i value = (__m256i)words;
    return (Words)_mm256_mul_epu32(value, _mm256_srli_epi64(value, 32));
  }
  static TDDP_AVX2_INLINE Words swap_neighbours(Words words) {
    return (Words)_mm256_shuffle_epi32((__m256i)words, 0x4E);
  }
};

}  // namespace

constinit const CheckTable avx2_checks = make_check_table<Avx2>();

}  // namespace torchddp::kernels

#endif
