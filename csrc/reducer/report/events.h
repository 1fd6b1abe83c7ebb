// Reports the events of a step to the timeline, the statistics and the live status.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gpu/ready_clock.h"
#include "reducer/base/context.h"
#include "reducer/report/status.h"
#include "reducer/report/step_stats.h"
#include "timeline/timeline.h"

namespace torchddp::reducer {

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
  void packed(int64_t bucket) { timeline_.record(timeline::EventKind::kPacked, bucket); }
  void launching(int64_t index, const bucket::Bucket& bucket);
  // `operation`: the transport's byte counts for it; null if a communication hook has sent the bytes.
  void launched(int64_t bytes, const transport::Traffic* operation);
  void wait_begins(int64_t bucket) { timeline_.record(timeline::EventKind::kWaitBegin, bucket); }
  void reduced(int64_t bucket) { timeline_.record(timeline::EventKind::kDone, bucket); }
  void backward_computed() { stats_.current.backward_compute_end_ns = wall_clock_ns(); }
  void all_reduced() { stats_.current.comm_end_ns = wall_clock_ns(); }
  void end_step();

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

 private:
  void record_ready(int64_t param);

  const Context& context_;
  mutable LiveStatus live_;
  StepStats stats_;
  timeline::Timeline timeline_;
  int64_t backward_begin_ns_ = 0;  // steady clock
  bool records_ready_times_ = false;
  std::vector<int64_t> ready_times_ns_;           // only while recording, or if the timeline is on
  std::unique_ptr<gpu::ReadyClock> ready_clock_;  // of a device, while recording
};

}  // namespace torchddp::reducer
