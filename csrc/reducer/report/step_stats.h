// How long each part of a step took: the few clock readings behind torch's DDP logging fields.
#pragma once

#include <atomic>
#include <cstdint>

#include "transport/traffic.h"

namespace torchddp::reducer {

// Counted over all reducers of this process.
inline std::atomic<int64_t> all_finished_steps{0};

// Wall-clock nanoseconds since the epoch (as torch logs them); 0 if not measured.
struct StepTimes {
  int64_t forward_begin_ns = 0;
  int64_t backward_begin_ns = 0;
  int64_t comm_begin_ns = 0;  // first bucket launched
  int64_t backward_compute_end_ns = 0;
  int64_t comm_end_ns = 0;      // last bucket reduced
  int64_t buckets_reduced = 0;  // without skipped ones
  int64_t bytes_reduced = 0;    // of those buckets, as stored
  transport::Traffic traffic;   // of the gradients; a communication hook's traffic is only known to the hook
  int64_t hook_bytes = 0;       // given to the hook

  // Counts one operation. `gradient_bytes`: the size of its input, which is larger than what it sent if copies are narrower.
  void count(transport::Traffic operation, int64_t gradient_bytes);

  int64_t forward_ns() const { return span(forward_begin_ns, backward_begin_ns); }
  int64_t backward_ns() const { return span(backward_begin_ns, backward_compute_end_ns); }
  int64_t comm_ns() const { return span(comm_begin_ns, comm_end_ns); }
  int64_t overlap_ns() const { return span(comm_begin_ns, backward_compute_end_ns); }
  int64_t exposed_ns() const { return span(backward_compute_end_ns, comm_end_ns); }

 private:
  static int64_t span(int64_t begin, int64_t end) { return begin == 0 || end < begin ? 0 : end - begin; }
};

struct StepStats {
  StepTimes current;  // of the current step
  StepTimes last;     // of the last finished step
  int64_t steps = 0;  // synchronized forwards begun
  int64_t finished = 0;
  int64_t sum_forward_ns = 0, sum_backward_ns = 0, sum_comm_ns = 0, sum_overlap_ns = 0;

  void finish_step() {
    last = current;
    ++finished;
    all_finished_steps.fetch_add(1, std::memory_order_relaxed);
    sum_forward_ns += last.forward_ns();
    sum_backward_ns += last.backward_ns();
    sum_comm_ns += last.comm_ns();
    sum_overlap_ns += last.overlap_ns();
  }
};

int64_t wall_clock_ns();

}  // namespace torchddp::reducer
