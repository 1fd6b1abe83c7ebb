// AVX-512 sum kernels. Whether the processor has the instructions is decided in pack_avx512.cpp.
#if defined(__x86_64__)

#include "kernels/floats_avx512.h"

#define TDDP_SUM_TARGET TDDP_AVX512
#include "kernels/sum_body.h"

namespace torchddp::kernels {
namespace {

struct Avx512 {
  using Floats = avx512::Floats;
  static constexpr int64_t kVectorBytes = 64;
  static constexpr bool kHasVectorHalves = true;
  static constexpr Floats::Mask kAll = static_cast<Floats::Mask>(~Floats::Mask{0});

  template <DType Src>
  static TDDP_AVX512_INLINE Floats::Vector load(const unsigned char* src) {
    return Floats::load<Src>(src, kAll);
  }

  template <DType Dst>
  static TDDP_AVX512_INLINE void store(unsigned char* dst, Floats::Vector value) {
    Floats::store<Dst>(dst, value, kAll);
  }

  typedef uint32_t Words32 __attribute__((vector_size(64)));
  typedef uint64_t Words64 __attribute__((vector_size(64)));

  static TDDP_AVX512_INLINE bool any_top_bit(Words32 words) { return _mm512_movepi32_mask((__m512i)words) != 0; }
  static TDDP_AVX512_INLINE bool any_top_bit(Words64 words) { return _mm512_movepi64_mask((__m512i)words) != 0; }
};

}  // namespace

constinit const SumTable avx512_sums = make_sum_table<Avx512>();

}  // namespace torchddp::kernels

#endif
