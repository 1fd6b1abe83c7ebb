// AVX-512 kernels: tails are masked, so any number of elements takes the same path. Only functions marked TDDP_AVX512
// hold such instructions; the rest of the file is baseline code.
#include "kernels/pack_table.h"

#if defined(__x86_64__)

#include "kernels/check_table.h"
#include "kernels/compress_table.h"
#include "kernels/floats_avx512.h"
#include "kernels/pack_scalar.h"
#include "kernels/sum_table.h"

namespace torchddp::kernels {
namespace {

using avx512::Doubles;
using avx512::Floats;

template <DType Dst, DType Src>
struct Avx512Kernel {
  using Math = std::conditional_t<std::is_same_v<Product<Dst, Src>, double>, Doubles, Floats>;
  using Mask = typename Math::Mask;
  static constexpr int64_t kWidth = Math::kWidth;
  static constexpr int64_t kDstBytes = item_size(Dst);
  static constexpr int64_t kSrcBytes = item_size(Src);

  TDDP_AVX512 static void run(void* dst_data, const void* src_data, int64_t numel, double scale) {
    auto* dst = static_cast<unsigned char*>(dst_data);
    const auto* src = static_cast<const unsigned char*>(src_data);
    const auto factor = Math::broadcast(scale);
    constexpr Mask kAll = static_cast<Mask>(~Mask{0});
    int64_t i = 0;
    for (; i + kWidth <= numel; i += kWidth) {
      Math::template store<Dst>(dst + i * kDstBytes,
                                Math::multiply(Math::template load<Src>(src + i * kSrcBytes, kAll), factor), kAll);
    }
    if (i == numel) return;
    const Mask lanes = static_cast<Mask>((1u << (numel - i)) - 1u);
    Math::template store<Dst>(dst + i * kDstBytes,
                              Math::multiply(Math::template load<Src>(src + i * kSrcBytes, lanes), factor), lanes);
  }
};

constexpr KernelTable kTable = make_table<Avx512Kernel>("avx512", avx512_sums, avx512_compress, avx512_checks);

}  // namespace

const KernelTable* avx512_table() {
  const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                         avx2_table() != nullptr;
  return supported ? &kTable : nullptr;
}

}  // namespace torchddp::kernels

#else

namespace torchddp::kernels {
const KernelTable* avx512_table() { return nullptr; }
}  // namespace torchddp::kernels

#endif
