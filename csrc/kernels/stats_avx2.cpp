// AVX2 + F16C statistics kernels. Whether the processor has them is decided in pack_avx2.cpp.
#if defined(__x86_64__)

#include "kernels/floats_avx2.h"

#define TDDP_STATS_TARGET TDDP_AVX2
#include "kernels/stats_body.h"

namespace torchddp::kernels {

constinit const StatsTable avx2_stats = make_stats_table<avx2::Doubles>();

}  // namespace torchddp::kernels

#endif
