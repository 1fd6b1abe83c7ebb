// Loops over elements, on torch's threads if there are enough of them.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>

namespace torchddp::bucket {

// Below twice this, waking a second thread costs more than the work. In elements, as at::parallel_for counts.
constexpr int64_t kParallelGrain = 256 * 1024;

// The sum of part(begin, end) over ranges that cover [0, numel).
template <typename Part>
int64_t sum_of_parts(int64_t numel, Part&& part) {
  if (numel < 2 * kParallelGrain || at::get_num_threads() == 1) return part(0, numel);
  std::atomic<int64_t> sum{0};
  at::parallel_for(0, numel, kParallelGrain, [&](int64_t begin, int64_t end) { sum += part(begin, end); });
  return sum;
}

}  // namespace torchddp::bucket
