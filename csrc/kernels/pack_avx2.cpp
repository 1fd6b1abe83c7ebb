// AVX2 + F16C kernels. Only functions marked TDDP_AVX2 hold such instructions; the rest of the file is baseline code.
#include "kernels/pack_table.h"

#if defined(__x86_64__)

#include "kernels/check_table.h"
#include "kernels/compress_table.h"
#include "kernels/floats_avx2.h"
#include "kernels/pack_scalar.h"
#include "kernels/sum_table.h"

namespace torchddp::kernels {
namespace {

using avx2::Doubles;
using avx2::Floats;

template <DType Dst, DType Src>
struct Avx2Kernel {
  using Math = std::conditional_t<std::is_same_v<Product<Dst, Src>, double>, Doubles, Floats>;
  static constexpr int64_t kWidth = Math::kWidth;
  static constexpr int64_t kDstBytes = item_size(Dst);
  static constexpr int64_t kSrcBytes = item_size(Src);

  TDDP_AVX2 static void run(void* dst_data, const void* src_data, int64_t numel, double scale) {
    auto* dst = static_cast<unsigned char*>(dst_data);
    const auto* src = static_cast<const unsigned char*>(src_data);
    if (numel < kWidth) return scale_cast_scalar<Dst, Src>(dst, src, numel, scale);
    const auto factor = Math::broadcast(scale);
    // The tail is one whole vector that overlaps the last one of the loop. It is read before anything is written,
    // because in place the loop overwrites its first elements.
    const int64_t last = numel - kWidth;
    const auto tail = Math::multiply(Math::template load<Src>(src + last * kSrcBytes), factor);
    for (int64_t i = 0; i < last; i += kWidth) {
      Math::template store<Dst>(dst + i * kDstBytes,
                                Math::multiply(Math::template load<Src>(src + i * kSrcBytes), factor));
    }
    Math::template store<Dst>(dst + last * kDstBytes, tail);
  }
};

constexpr KernelTable kTable = make_table<Avx2Kernel>("avx2", avx2_sums, avx2_compress, avx2_checks);

}  // namespace

const KernelTable* avx2_table() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? &kTable : nullptr;
}

}  // namespace torchddp::kernels

#else

namespace torchddp::kernels {
const KernelTable* avx2_table() { return nullptr; }
}  // namespace torchddp::kernels

#endif
