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
};

}  // namespace

constinit const SumTable avx2_sums = make_sum_table<Avx2>();

}  // namespace torchddp::kernels

#endif
