#include "gpu/stream_set.h"

#include <algorithm>
#include <utility>

namespace torchddp::gpu {

void StreamSet::add(Stream stream) {
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
    streams_.push_back(stream);
  }
}

void StreamSet::join_into(Device& device, Stream target, Event event) const {
  for (auto* stream : streams_) {
    if (stream != target) {
      device.record(event, stream);
      device.wait(target, event);
    }
  }
}

void StreamSet::wait_back(Device& device, Stream source, Event event) const {
  bool recorded = false;
  for (auto* stream : streams_) {
    if (stream != source) {
      if (!std::exchange(recorded, true)) {
        device.record(event, source);
      }
      device.wait(stream, event);
    }
  }
}

}  // namespace torchddp::gpu
