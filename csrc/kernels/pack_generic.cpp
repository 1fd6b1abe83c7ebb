// The portable kernels: any processor, and the yardstick for the others.
#include "kernels/check_table.h"
#include "kernels/compress_table.h"
#include "kernels/pack_scalar.h"
#include "kernels/pack_table.h"
#include "kernels/sum_table.h"

namespace torchddp::kernels {
namespace {

template <DType Dst, DType Src>
struct GenericKernel {
  static void run(void* dst, const void* src, int64_t numel, double scale) {
    scale_cast_scalar<Dst, Src>(static_cast<unsigned char*>(dst), static_cast<const unsigned char*>(src), numel, scale);
  }
};

constexpr KernelTable kTable = make_table<GenericKernel>("generic", generic_sums, generic_compress, generic_checks);

}  // namespace

const KernelTable* generic_table() { return &kTable; }

}  // namespace torchddp::kernels
