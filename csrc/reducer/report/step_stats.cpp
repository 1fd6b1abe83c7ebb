#include "reducer/report/step_stats.h"

#include <chrono>

namespace torchddp::reducer {

void StepTimes::count(transport::Traffic operation, int64_t gradient_bytes) {
  for (size_t i = 0; i < transport::kNumRoutes; ++i) {
    auto& payload_bytes = operation.routes[i].payload_bytes;
    if (payload_bytes > 0 && i != static_cast<size_t>(transport::Route::kOuter)) {  // sees only part of them
      payload_bytes = gradient_bytes;
    }
  }
  traffic += operation;
}

int64_t wall_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace torchddp::reducer
