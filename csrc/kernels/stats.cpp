// The checks of the statistics, then chunk by chunk: the order of additions depends on the chunks, so both functions share
// them.
#include "kernels/stats.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/pack.h"
#include "kernels/pack_table.h"
#include "kernels/stats_table.h"

namespace torchddp::kernels {
namespace {

StatsFn kernel_for(DType dtype) {
  if (!is_float(dtype)) {
    throw std::invalid_argument("only floating point elements have statistics, got type " +
                                std::to_string(static_cast<int>(dtype)));
  }
  return (*active_table().stats)[static_cast<size_t>(dtype)];
}

}  // namespace

GradStats measure(const void* data, DType dtype, int64_t numel) {
  const StatsFn kernel = kernel_for(dtype);
  const auto* bytes = static_cast<const unsigned char*>(data);
  GradStats stats;
  for (int64_t i = 0; i < numel; i += kStatsChunk) {
    stats.merge(kernel(bytes + i * item_size(dtype), std::min(kStatsChunk, numel - i)));
  }
  return stats;
}

GradStats scale_cast_stats(void* dst, DType dst_type, const void* src, DType src_type, int64_t numel, double scale) {
  const StatsFn kernel = kernel_for(dst_type);
  auto* to = static_cast<unsigned char*>(dst);
  const auto* from = static_cast<const unsigned char*>(src);
  GradStats stats;
  for (int64_t i = 0; i < numel; i += kStatsChunk) {
    const int64_t chunk = std::min(kStatsChunk, numel - i);
    scale_cast(to + i * item_size(dst_type), dst_type, from + i * item_size(src_type), src_type, chunk, scale);
    stats.merge(kernel(to + i * item_size(dst_type), chunk));
  }
  return stats;
}

}  // namespace torchddp::kernels
