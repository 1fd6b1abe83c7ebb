// Finds infinities and NaNs while the data is in cache anyway. Works in chunks: a chunk that contains one, which is rare, is
// counted element by element.
#include <algorithm>

#include "kernels/float_bits.h"
#include "kernels/kernel_table.h"
#include "kernels/pack.h"

namespace torchddp::kernels {
namespace {

// Elements between two checks for non-finite values.
constexpr int64_t kChunk = 2048;

template <DType Src>
int64_t count_each(const unsigned char* data, int64_t numel) {
  int64_t count = 0;
  for (int64_t i = 0; i < numel; ++i) {
    count += (load_bits<Src>(data + i * item_size(Src)) & exponent_bits<Src>()) == exponent_bits<Src>() ? 1 : 0;
  }
  return count;
}

constexpr decltype(&count_each<DType::kF32>) kCountEach[kNumFloatTypes] = {
    &count_each<DType::kF64>, &count_each<DType::kF32>, &count_each<DType::kF16>, &count_each<DType::kBF16>};

int64_t count_chunk(AnyNonFiniteFn any, const unsigned char* data, DType dtype, int64_t numel) {
  if (!any(data, numel)) [[likely]] {
    return 0;
  }
  return kCountEach[static_cast<size_t>(dtype)](data, numel);
}

AnyNonFiniteFn kernel_for(DType dtype) { return active_table().any_non_finite[static_cast<size_t>(dtype)]; }

}  // namespace

int64_t count_non_finite(const void* data, DType dtype, int64_t numel) {
  if (!is_float(dtype)) return 0;
  const AnyNonFiniteFn any = kernel_for(dtype);
  const auto* bytes = static_cast<const unsigned char*>(data);
  int64_t count = 0;
  for (int64_t i = 0; i < numel; i += kChunk) {
    count += count_chunk(any, bytes + i * item_size(dtype), dtype, std::min(kChunk, numel - i));
  }
  return count;
}

int64_t scale_cast_counting(void* dst, DType dst_type, const void* src, DType src_type, int64_t numel, double scale) {
  if (!is_float(src_type)) {
    scale_cast(dst, dst_type, src, src_type, numel, scale);
    return 0;
  }
  const AnyNonFiniteFn any = kernel_for(src_type);
  auto* to = static_cast<unsigned char*>(dst);
  const auto* from = static_cast<const unsigned char*>(src);
  int64_t count = 0;
  for (int64_t i = 0; i < numel; i += kChunk) {
    const int64_t chunk = std::min(kChunk, numel - i);
    count += count_chunk(any, from + i * item_size(src_type), src_type, chunk);
    scale_cast(to + i * item_size(dst_type), dst_type, from + i * item_size(src_type), src_type, chunk, scale);
  }
  return count;
}

}  // namespace torchddp::kernels
