// AVX-512 kernels that check memory. Whether the processor has them is decided in pack_avx512.cpp.
#if defined(__x86_64__)

#include "kernels/floats_avx512.h"

#define TDDP_CHECKS_TARGET TDDP_AVX512
#include "kernels/checks_body.h"

namespace torchddp::kernels {
namespace {

struct Avx512 {
  static constexpr int kBytes = 64;
  typedef uint64_t Words __attribute__((vector_size(64)));

  static TDDP_AVX512_INLINE Words multiply_halves(Words words) {
    const __m512i value = (__m512i)words;
    return (Words)_mm512_mul_epu32(value, _mm512_srli_epi64(value, 32));
  }
  static TDDP_AVX512_INLINE Words swap_neighbours(Words words) {
    return (Words)_mm512_shuffle_epi32((__m512i)words, static_cast<_MM_PERM_ENUM>(0x4E));
  }
};

}  // namespace

constinit const CheckTable avx512_checks = make_check_table<Avx512>();

}  // namespace torchddp::kernels

#endif
