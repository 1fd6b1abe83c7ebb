#include "timeline/timeline.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace torchddp::timeline {

void Timeline::enable(int64_t capacity) {
  if (capacity <= 0) {
    throw std::invalid_argument("timeline capacity must be a positive number of events, got " +
                                std::to_string(capacity));
  }
  ring_.assign(capacity, Event{});
  written_.store(0, std::memory_order_relaxed);
  enabled_.store(true, std::memory_order_release);
}

void Timeline::record_at(EventKind kind, int64_t id, int64_t time_ns) {
  if (!enabled()) return;
  const auto position = written_.fetch_add(1, std::memory_order_relaxed) % std::ssize(ring_);
  ring_[position] = Event{time_ns, static_cast<int32_t>(id), kind};
}

std::vector<Event> Timeline::snapshot() const {
  const auto written = written_.load(std::memory_order_acquire);
  const auto capacity = std::ssize(ring_);
  std::vector<Event> events;
  events.reserve(std::min(written, capacity));
  for (int64_t i = std::max<int64_t>(0, written - capacity); i < written; ++i) {
    events.push_back(ring_[i % capacity]);
  }
  return events;
}

int64_t Timeline::dropped() const {
  return std::max<int64_t>(0, written_.load(std::memory_order_relaxed) - std::ssize(ring_));
}

}  // namespace torchddp::timeline
