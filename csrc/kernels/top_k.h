// The k numbers of largest magnitude, exactly, in time linear in their number and without a sort.
//
// Free of torch headers, like pack.h. (Top-k sparsification with error feedback: Stich et al. 2018, Sparsified SGD with Memory.)
#pragma once

#include <cstdint>

namespace torchddp::kernels {

// Indices have 32 bits.
inline constexpr int64_t kMaxTopKNumel = int64_t{1} << 31;

// Of v = source * scale + residual (or source * scale where `residual` is null), the k numbers with the largest |v|: their
// indices, ascending, and their values. A NaN counts as larger than anything, NaNs as equal; of equal magnitudes those with
// lower indices are taken. Then residual = v, with zeros in place of what was taken and of what is not finite.
//
// 0 <= k <= numel <= kMaxTopKNumel. No overlap between the arrays, which are aligned as their types want. The same bits on
// every processor. Allocates eight bytes per candidate: some more than k, in the worst case numel.
void select_top_k(const float* source, int64_t numel, int64_t k, int32_t* indices, float* values, float* residual,
                  float scale);

}  // namespace torchddp::kernels
