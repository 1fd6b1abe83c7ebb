// The portable sum kernels: 16-byte vectors, which the baseline of every 64-bit processor has.
#define TDDP_SUM_TARGET
#include "kernels/pack_scalar.h"
#include "kernels/sum_body.h"

namespace torchddp::kernels {
namespace {

struct Generic {
  static constexpr int64_t kVectorBytes = 16;
  static constexpr bool kHasVectorHalves = false;
  typedef float Floats __attribute__((vector_size(kVectorBytes)));

  template <DType Src>
  static TDDP_ALWAYS_INLINE Floats load(const unsigned char* src) {
    return Floats{load_as<Src, float>(src), load_as<Src, float>(src + 2), load_as<Src, float>(src + 4),
                  load_as<Src, float>(src + 6)};
  }

  template <DType Dst>
  static TDDP_ALWAYS_INLINE void store(unsigned char* dst, Floats value) {
    for (int lane = 0; lane < 4; ++lane) store_as<Dst, float>(dst + 2 * lane, value[lane]);
  }

  typedef uint32_t Words32 __attribute__((vector_size(kVectorBytes)));
  typedef uint64_t Words64 __attribute__((vector_size(kVectorBytes)));

  static TDDP_ALWAYS_INLINE bool any_top_bit(Words32 words) {
    const auto pairs = (Words64)words;
    return ((pairs[0] | pairs[1]) & 0x8000000080000000u) != 0;
  }
  static TDDP_ALWAYS_INLINE bool any_top_bit(Words64 words) { return (words[0] | words[1]) >> 63 != 0; }
};

}  // namespace

constinit const SumTable generic_sums = make_sum_table<Generic>();

}  // namespace torchddp::kernels
