#include "reducer/step_stats.h"

#include <chrono>

namespace torchddp::reducer {

int64_t wall_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace torchddp::reducer
