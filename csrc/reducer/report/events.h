// Reports the events of a step to the timeline, the statistics, the profiler and the live status.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "bucket/bucket.h"
#include "gpu/ready_clock.h"
#include "reducer/base/context.h"
#include "reducer/report/status.h"
#include "timeline/timeline.h"
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

// Sums over `steps`, in ns, by bucket: from the end of the step before until it was packed, and the waits for its averages.
struct BucketTimes {
  int64_t steps = 0;
  std::vector<std::pair<int64_t, int64_t>> of_buckets;
};

// Behind torch's DDP logging fields.
struct StepStats {
  StepTimes current;  // of the current step
  StepTimes last;     // of the last finished step
  int64_t steps = 0;  // synchronized forwards begun
  int64_t finished = 0;
  int64_t matched = 0;  // steps of the others in which this rank took part under join()
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

// A torch.profiler range around work on one bucket: "torchddp.launch bucket 3 (4194304 bytes: 'head.weight', 'norm.bias' and 7
// more)". Takes nanoseconds while no profiler runs.
class BucketRange {
 public:
  BucketRange(const char* what, int64_t index, const bucket::Bucket& bucket, std::span<const plan::ParamSpec> specs);

 private:
  at::RecordFunction guard_;
};

// Each event of a step is reported once, here. Autograd threads call grad_ready(); launches and ends of reductions come from
// one thread at a time, everything else from the training thread.
class StepEvents {
 public:
  explicit StepEvents(const Context& context) : context_(context) {}

  void begin_forward();
  void begin_backward();
  void grad_ready(int64_t param) {
    if (records_ready_times_ || timeline_.enabled()) [[unlikely]] {
      record_ready(param);
    }
  }
  void packed(int64_t bucket);
  void launching(int64_t index, const bucket::Bucket& bucket);
  // `operation`: the transport's byte counts for it; null if a communication hook has sent the bytes.
  void launched(int64_t bytes, const transport::Traffic* operation);
  void wait_begins(int64_t bucket);
  void reduced(int64_t bucket);
  void backward_computed() { stats_.current.backward_compute_end_ns = wall_clock_ns(); }
  void all_reduced() { stats_.current.comm_end_ns = wall_clock_ns(); }
  void end_step();
  void end_matched_step() { ++stats_.matched; }

  // Continues the step count of the previous reducer.
  void take_over(const StepEvents& before) { stats_ = before.stats_; }
  int64_t steps() const { return stats_.steps; }
  const StepStats& stats() const { return stats_; }
  LiveStatus& live() const { return live_; }
  timeline::Timeline& timeline() { return timeline_; }
  void enable_timeline(int64_t capacity);

  // Records ready times as the timeline does, but without its events; on a CUDA device by the device's clock.
  void record_ready_times(bool record);
  // By parameter, in ns since backward began.
  std::vector<int64_t> ready_times_ns() const;
  // Of the last recorded step: from the start of forward to the first gradient, by the device's clock if ready times are.
  int64_t forward_ns() const;
  // Of the steps since the last call, without a wrapper's first. By the processor's clock. Between steps only.
  BucketTimes take_bucket_times() { return std::exchange(bucket_times_, {}); }

 private:
  void record_ready(int64_t param);

  const Context& context_;
  mutable LiveStatus live_;
  StepStats stats_;
  timeline::Timeline timeline_;
  BucketTimes bucket_times_;
  int64_t last_end_ns_ = 0;  // steady clock, as the following
  int64_t wait_begin_ns_ = 0;
  int64_t backward_begin_ns_ = 0;
  bool records_ready_times_ = false;
  std::vector<int64_t> ready_times_ns_;           // only while recording, or if the timeline is on
  std::unique_ptr<gpu::ReadyClock> ready_clock_;  // of a device, while recording
};

}  // namespace torchddp::reducer
