// The portable statistics kernels: 16-byte vectors, which the baseline of every 64-bit processor has.
#define TDDP_STATS_TARGET
#include "kernels/stats_body.h"

namespace torchddp::kernels {
namespace {

struct Generic {
  static constexpr int64_t kWidth = 2;
  typedef double Doubles __attribute__((vector_size(16)));

  template <DType Src>
  static TDDP_ALWAYS_INLINE Doubles load(const unsigned char* src) {
    return Doubles{load_as<Src, double>(src), load_as<Src, double>(src + item_size(Src))};
  }
};

}  // namespace

constinit const StatsTable generic_stats = make_stats_table<Generic>();

}  // namespace torchddp::kernels
