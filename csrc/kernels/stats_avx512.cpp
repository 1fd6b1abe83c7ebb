// AVX-512 statistics kernels. Whether the processor has them is decided in pack_avx512.cpp.
#if defined(__x86_64__)

#include "kernels/floats_avx512.h"

#define TDDP_STATS_TARGET TDDP_AVX512
#include "kernels/stats_body.h"

namespace torchddp::kernels {
namespace {

struct Avx512 {
  static constexpr int64_t kWidth = avx512::Doubles::kWidth;

  template <DType Src>
  static TDDP_AVX512_INLINE __m512d load(const unsigned char* src) {
    return avx512::Doubles::load<Src>(src, 0xFF);
  }
};

}  // namespace

constinit const StatsTable avx512_stats = make_stats_table<Avx512>();

}  // namespace torchddp::kernels

#endif
