#include "reducer/report/events.h"

#include <chrono>

#include "reducer/report/messages.h"

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

BucketRange::BucketRange(const char* what, int64_t index, const bucket::Bucket& bucket,
                         std::span<const plan::ParamSpec> specs)
    : guard_(at::RecordScope::USER_SCOPE) {
  if (guard_.isActive()) [[unlikely]] {
    guard_.before(c10::str("torchddp.", what, " bucket ", index, " (", bucket.bytes(),
                           " bytes: ", list_names(bucket.params(), specs, 2), ")"));
  }
}

using timeline::EventKind;

void StepEvents::begin_forward() {
  ++stats_.steps;
  live_.begin_forward(stats_.steps);
  stats_.current = StepTimes{};
  stats_.current.forward_begin_ns = wall_clock_ns();
  if (ready_clock_ != nullptr) ready_clock_->begin_forward();
  timeline_.record(EventKind::kForwardBegin, stats_.steps);
}

void StepEvents::begin_backward() {
  live_.begin_backward();
  stats_.current.backward_begin_ns = wall_clock_ns();
  backward_begin_ns_ = timeline::now_ns();
  timeline_.record_at(EventKind::kBackwardBegin, stats_.steps, backward_begin_ns_);
  if (ready_clock_ != nullptr) ready_clock_->begin_backward();
}

void StepEvents::record_ready(int64_t param) {
  const auto now_ns = timeline::now_ns();  // read once, because the clock is most of an event's cost
  ready_times_ns_[param] = now_ns - backward_begin_ns_;
  timeline_.record_at(EventKind::kGradReady, param, now_ns);
  if (ready_clock_ != nullptr) ready_clock_->mark(static_cast<size_t>(param));
}

void StepEvents::packed(int64_t bucket) {
  const auto now_ns = timeline::now_ns();
  if (last_end_ns_ != 0) {
    auto& times = bucket_times_.of_buckets;
    if (std::ssize(times) <= bucket) times.resize(bucket + 1);
    times[bucket].first += now_ns - last_end_ns_;
  }
  timeline_.record_at(EventKind::kPacked, bucket, now_ns);
}

void StepEvents::wait_begins(int64_t bucket) {
  wait_begin_ns_ = timeline::now_ns();
  timeline_.record_at(EventKind::kWaitBegin, bucket, wait_begin_ns_);
}

void StepEvents::reduced(int64_t bucket) {
  const auto now_ns = timeline::now_ns();
  if (last_end_ns_ != 0) bucket_times_.of_buckets[bucket].second += now_ns - wait_begin_ns_;
  timeline_.record_at(EventKind::kDone, bucket, now_ns);
}

void StepEvents::launching(int64_t index, const bucket::Bucket& bucket) {
  ++stats_.current.buckets_reduced;
  stats_.current.bytes_reduced += bucket.bytes();
  if (stats_.current.comm_begin_ns == 0) stats_.current.comm_begin_ns = wall_clock_ns();
  timeline_.record(EventKind::kLaunched, index);
}

void StepEvents::launched(int64_t bytes, const transport::Traffic* operation) {
  if (operation == nullptr) {
    stats_.current.hook_bytes += bytes;
  } else {
    stats_.current.count(*operation, bytes);
  }
}

void StepEvents::end_step() {
  timeline_.record(EventKind::kBackwardEnd, stats_.steps);
  stats_.finish_step();
  live_.end_step();
  bucket_times_.steps += last_end_ns_ != 0;
  last_end_ns_ = timeline::now_ns();
}

void StepEvents::enable_timeline(int64_t capacity) {
  ready_times_ns_.assign(context_.params.size(), 0);
  timeline_.enable(capacity);
}

void StepEvents::record_ready_times(bool record) {
  if (record) ready_times_ns_.assign(context_.params.size(), 0);
  records_ready_times_ = record;
  ready_clock_ = record && context_.devices.size() == 1
                     ? std::make_unique<gpu::ReadyClock>(context_.devices.front(), context_.params.size())
                     : nullptr;
}

std::vector<int64_t> StepEvents::ready_times_ns() const {
  if (ready_clock_ != nullptr) return ready_clock_->read_ns();
  return ready_times_ns_.empty() ? std::vector<int64_t>(context_.params.size(), 0) : ready_times_ns_;
}

int64_t StepEvents::forward_ns() const {
  return ready_clock_ != nullptr ? ready_clock_->forward_ns() : stats_.last.forward_ns();
}

}  // namespace torchddp::reducer
