// Loops over elements, on torch's threads where there are many.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>

namespace torchddp::bucket {

// Below twice this, waking a second thread costs more than the work. Elements, not bytes: at::parallel_for counts those.
constexpr int64_t kParallelGrain = 256 * 1024;

inline bool is_for_one_thread(int64_t numel) { return numel < 2 * kParallelGrain || at::get_num_threads() == 1; }

// part(begin, end) for ranges that make up [0, numel).
template <typename Part>
void for_parts(int64_t numel, Part&& part) {
  if (is_for_one_thread(numel)) {
    part(0, numel);
  } else {
    at::parallel_for(0, numel, kParallelGrain, part);
  }
}

// The sum of what they return.
template <typename Part>
int64_t sum_of_parts(int64_t numel, Part&& part) {
  if (is_for_one_thread(numel)) {
    return part(0, numel);
  }
  std::atomic<int64_t> sum{0};
  at::parallel_for(0, numel, kParallelGrain, [&](int64_t begin, int64_t end) { sum += part(begin, end); });
  return sum;
}

}  // namespace torchddp::bucket
