#include "gpu/ready_clock.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace torchddp::gpu {

ReadyClock::ReadyClock(std::shared_ptr<Device> device, size_t count)
    : device_(std::move(device)), forward_(device_->make_timing_event()), begin_(device_->make_timing_event()),
      is_marked_(count, 0) {
  marks_.reserve(count);
  for (size_t i = 0; i < count; ++i) marks_.push_back(device_->make_timing_event());
}

ReadyClock::~ReadyClock() {
  device_->destroy_event(forward_);
  device_->destroy_event(begin_);
  for (auto* const mark : marks_) device_->destroy_event(mark);
}

void ReadyClock::begin_forward() {
  auto* const stream = device_->current_stream();
  measures_ = false;
  has_forward_ = !device_->capturing(stream);
  if (has_forward_) device_->record(forward_, stream);
}

int64_t ReadyClock::forward_ns() {
  device_->synchronize(forward_);
  device_->synchronize(begin_);
  return has_forward_ && measures_ ? std::llround(1e6 * device_->elapsed_ms(forward_, begin_)) : 0;
}

void ReadyClock::begin_backward() {
  std::ranges::fill(is_marked_, 0);
  auto* const stream = device_->current_stream();
  measures_ = !device_->capturing(stream);
  if (measures_) device_->record(begin_, stream);
}

void ReadyClock::mark(size_t index) {
  if (measures_) {
    device_->record(marks_[index], device_->current_stream());
    is_marked_[index] = 1;
  }
}

std::vector<int64_t> ReadyClock::read_ns() {
  device_->synchronize(begin_);
  std::vector<int64_t> times_ns(marks_.size(), 0);
  for (size_t i = 0; i < marks_.size(); ++i) {
    if (is_marked_[i] != 0) {
      device_->synchronize(marks_[i]);
      // Streams other than the first may have been ahead of it.
      times_ns[i] = std::max<int64_t>(0, std::llround(1e6 * device_->elapsed_ms(begin_, marks_[i])));
    }
  }
  return times_ns;
}

}  // namespace torchddp::gpu
