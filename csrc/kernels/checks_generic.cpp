// The portable kernels that check memory: 16-byte vectors, which the baseline of every 64-bit processor has.
#define TDDP_CHECKS_TARGET
#include "kernels/checks_body.h"

namespace torchddp::kernels {
namespace {

struct Generic {
  static constexpr int kBytes = 16;
  typedef uint64_t Words __attribute__((vector_size(16)));

  static TDDP_ALWAYS_INLINE Words multiply_halves(Words words) {
    return Words{(words[0] & 0xFFFFFFFFu) * (words[0] >> 32), (words[1] & 0xFFFFFFFFu) * (words[1] >> 32)};
  }
  static TDDP_ALWAYS_INLINE Words swap_neighbours(Words words) { return Words{words[1], words[0]}; }
};

}  // namespace

constinit const CheckTable generic_checks = make_check_table<Generic>();

}  // namespace torchddp::kernels
