#include "gpu/bucket_streams.h"

#include <algorithm>
#include <utility>

namespace torchddp::gpu {

BucketStreams::BucketStreams(std::shared_ptr<Device> device)
    : device_(std::move(device)), fork_(device_->make_event()) {}

BucketStreams::~BucketStreams() { device_->destroy_event(fork_); }

void BucketStreams::begin_step() { producers_.clear(); }

void BucketStreams::note() {
  auto* const stream = device_->current_stream();
  const std::lock_guard lock(mutex_);
  if (std::ranges::find(producers_, stream) == producers_.end()) producers_.push_back(stream);
}

void BucketStreams::begin_packing() {
  packed_on_ = device_->current_stream();
  for (auto* stream : producers_) {
    if (stream != packed_on_) {
      device_->record(fork_, stream);
      device_->wait(packed_on_, fork_);
    }
  }
}

void BucketStreams::end_packing() { make_producers_wait(packed_on_); }

void BucketStreams::follow() {
  auto* const current = device_->current_stream();
  if (current != packed_on_) {
    device_->record(fork_, packed_on_);
    device_->wait(current, fork_);
  }
}

void BucketStreams::finish() { make_producers_wait(device_->current_stream()); }

void BucketStreams::make_producers_wait(Stream source, Place where) {
  bool recorded = false;
  for (auto* stream : producers_) {
    if (stream != source) {
      if (!std::exchange(recorded, true)) device_->record(fork_, source, where);
      device_->wait(stream, fork_, where);
    }
  }
}

}  // namespace torchddp::gpu
