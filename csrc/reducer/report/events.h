// Reports the events of a step to the timeline, the statistics, the profiler and the live status.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bucket/bucket.h"
#include "gpu/ready_clock.h"
#include "reducer/base/context.h"
#include "reducer/report/status.h"
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
  void count(transport::Traffic operation, int64_t gradient_bytes) {
    for (size_t i = 0; i < transport::kNumRoutes; ++i) {
      auto& payload_bytes = operation.routes[i].payload_bytes;
      if (payload_bytes > 0 && i != static_cast<size_t>(transport::Route::kOuter)) {  // sees only part of them
        payload_bytes = gradient_bytes;
      }
    }
    traffic += operation;
  }

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

inline int64_t wall_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Each event of a step is reported once, here. Autograd threads call grad_ready(); launches and ends of reductions come from
// one thread at a time, everything else from the training thread.
class StepEvents {
 public:
  explicit StepEvents(const Context& context) : context_(context) {}

  void begin_forward() {
    ++stats_.steps;
    live_.begin_forward(stats_.steps);
    stats_.current = StepTimes{};
    stats_.current.forward_begin_ns = wall_clock_ns();
    if (ready_clock_ != nullptr) ready_clock_->begin_forward();
    timeline_.record(timeline::EventKind::kForwardBegin, stats_.steps);
  }
  void begin_backward() {
    live_.begin_backward();
    stats_.current.backward_begin_ns = wall_clock_ns();
    backward_begin_ns_ = timeline::now_ns();
    timeline_.record_at(timeline::EventKind::kBackwardBegin, stats_.steps, backward_begin_ns_);
    if (ready_clock_ != nullptr) ready_clock_->begin_backward();
  }
  void grad_ready(int64_t param) {
    if (records_ready_times_ || timeline_.enabled()) [[unlikely]] {
      record_ready(param);
    }
  }
  void packed(int64_t bucket) {
    const auto now_ns = timeline::now_ns();
    if (last_end_ns_ != 0) {
      auto& times = bucket_times_.of_buckets;
      if (std::ssize(times) <= bucket) times.resize(bucket + 1);
      times[bucket].first += now_ns - last_end_ns_;
    }
    timeline_.record_at(timeline::EventKind::kPacked, bucket, now_ns);
  }
  void launching(int64_t index, const bucket::Bucket& bucket) {
    ++stats_.current.buckets_reduced;
    stats_.current.bytes_reduced += bucket.bytes();
    if (stats_.current.comm_begin_ns == 0) stats_.current.comm_begin_ns = wall_clock_ns();
    timeline_.record(timeline::EventKind::kLaunched, index);
  }
  // `operation`: the transport's byte counts for it; null if a communication hook has sent the bytes.
  void launched(int64_t bytes, const transport::Traffic* operation) {
    if (operation == nullptr) {
      stats_.current.hook_bytes += bytes;
    } else {
      stats_.current.count(*operation, bytes);
    }
  }
  void wait_begins(int64_t bucket) {
    wait_begin_ns_ = timeline::now_ns();
    timeline_.record_at(timeline::EventKind::kWaitBegin, bucket, wait_begin_ns_);
  }
  void reduced(int64_t bucket) {
    const auto now_ns = timeline::now_ns();
    auto& times = bucket_times_.of_buckets;
    if (bucket < std::ssize(times)) times[bucket].second += now_ns - wait_begin_ns_;
    timeline_.record_at(timeline::EventKind::kDone, bucket, now_ns);
  }
  void backward_computed() { stats_.current.backward_compute_end_ns = wall_clock_ns(); }
  void all_reduced() { stats_.current.comm_end_ns = wall_clock_ns(); }
  void end_step() {
    timeline_.record(timeline::EventKind::kBackwardEnd, stats_.steps);
    stats_.finish_step();
    live_.end_step();
    bucket_times_.steps += last_end_ns_ != 0;
    last_end_ns_ = timeline::now_ns();
  }
  void end_matched_step() { ++stats_.matched; }

  // Continues the step count of the previous reducer.
  void take_over(const StepEvents& before) { stats_ = before.stats_; }
  int64_t steps() const { return stats_.steps; }
  const StepStats& stats() const { return stats_; }
  LiveStatus& live() const { return live_; }
  timeline::Timeline& timeline() { return timeline_; }
  void enable_timeline(int64_t capacity) {
    ready_times_ns_.assign(context_.params.size(), 0);
    timeline_.enable(capacity);
  }

  // Records ready times as the timeline does, but without its events; on a CUDA device by the device's clock.
  void record_ready_times(bool record) {
    if (record) ready_times_ns_.assign(context_.params.size(), 0);
    records_ready_times_ = record;
    ready_clock_ = record && context_.devices.size() == 1
                       ? std::make_unique<gpu::ReadyClock>(context_.devices.front(), context_.params.size())
                       : nullptr;
  }
  // By parameter, in ns since backward began.
  std::vector<int64_t> ready_times_ns() const {
    if (ready_clock_ != nullptr) return ready_clock_->read_ns();
    return ready_times_ns_.empty() ? std::vector<int64_t>(context_.params.size(), 0) : ready_times_ns_;
  }
  // Of the last recorded step: from the start of forward to the first gradient, by the device's clock if ready times are.
  int64_t forward_ns() const { return ready_clock_ != nullptr ? ready_clock_->forward_ns() : stats_.last.forward_ns(); }
  // Of the steps since the last call, without a wrapper's first. By the processor's clock. Between steps only.
  BucketTimes take_bucket_times() { return std::exchange(bucket_times_, {}); }

 private:
  void record_ready(int64_t param) {
    const auto now_ns = timeline::now_ns();  // read once, because the clock is most of an event's cost
    ready_times_ns_[param] = now_ns - backward_begin_ns_;
    timeline_.record_at(timeline::EventKind::kGradReady, param, now_ns);
    if (ready_clock_ != nullptr) ready_clock_->mark(static_cast<size_t>(param));
  }

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
