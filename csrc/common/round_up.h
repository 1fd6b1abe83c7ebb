#pragma once

#include <cstdint>

namespace torchddp {

// For values that are not negative.
constexpr int64_t ceil_div(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }
constexpr int64_t round_up(int64_t value, int64_t unit) { return ceil_div(value, unit) * unit; }

}  // namespace torchddp
