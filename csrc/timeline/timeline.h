// Cheap events of a training step. Everyone writes; only Python's profiler reads.
//
// Thread safety: record() may be called from any thread; enable(), disable() and snapshot() only between steps.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace torchddp::timeline {

enum class EventKind : uint8_t {
  kForwardBegin,   // id: step
  kBackwardBegin,  // id: step; the first gradient hook of a step
  kGradReady,      // id: parameter
  kPacked,         // id: bucket; its last gradient is in flat memory
  kLaunched,       // id: bucket; its reduction was handed to the transport
  kWaitBegin,      // id: bucket; backward has nothing left to do but wait for it
  kDone,           // id: bucket; reduced, as seen by the wait
  kBackwardEnd,    // id: step; gradients are final
};

struct Event {
  int64_t time_ns = 0;  // steady clock
  int32_t id = 0;
  EventKind kind = EventKind::kForwardBegin;
};

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class Timeline {
 public:
  // Keeps the last `capacity` events (16 bytes each), allocated here and never in record().
  void enable(int64_t capacity) {
    if (capacity <= 0) {
      throw std::invalid_argument("timeline capacity must be a positive number of events, got " +
                                  std::to_string(capacity));
    }
    ring_.assign(capacity, Event{});
    written_.store(0, std::memory_order_relaxed);
    enabled_.store(true, std::memory_order_release);
  }
  void disable() { enabled_.store(false, std::memory_order_relaxed); }
  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }

  void record(EventKind kind, int64_t id) {
    if (enabled()) [[unlikely]] {
      record_at(kind, id, now_ns());
    }
  }
  void record_at(EventKind kind, int64_t id, int64_t time_ns) {
    if (!enabled()) return;
    const auto position = written_.fetch_add(1, std::memory_order_relaxed) % std::ssize(ring_);
    ring_[position] = Event{time_ns, static_cast<int32_t>(id), kind};
  }

  // Oldest first.
  std::vector<Event> snapshot() const {
    const auto written = written_.load(std::memory_order_acquire);
    const auto capacity = std::ssize(ring_);
    std::vector<Event> events;
    events.reserve(std::min(written, capacity));
    for (int64_t i = std::max<int64_t>(0, written - capacity); i < written; ++i) {
      events.push_back(ring_[i % capacity]);
    }
    return events;
  }
  // How many events the ring has overwritten.
  int64_t dropped() const { return std::max<int64_t>(0, written_.load(std::memory_order_relaxed) - std::ssize(ring_)); }

 private:
  std::atomic<bool> enabled_{false};
  std::atomic<int64_t> written_{0};
  std::vector<Event> ring_;
};

}  // namespace torchddp::timeline
