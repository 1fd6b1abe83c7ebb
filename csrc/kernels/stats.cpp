// Chunk by chunk: the order of additions depends on the chunks.
#include "kernels/stats.h"

#include <algorithm>
#include <stdexcept>
#include <string>

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

}  // namespace torchddp::kernels
