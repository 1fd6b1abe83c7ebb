// The handle of one collective operation.
#pragma once

#include <chrono>

namespace torchddp::transport {

// Wait for as long as the transport's own time limit allows (for c10d: the process group's timeout).
inline constexpr std::chrono::milliseconds kTransportTimeout{0};

// A Work is created once (Transport::make_work) and reused by every collective it is passed to, so that a steady training step
// allocates nothing. One collective at a time; not thread-safe.
class Work {
 public:
  virtual ~Work() = default;
  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  // True when nothing is in flight: finished, failed (then wait() throws), or never started. Never blocks.
  virtual bool poll() = 0;

  // Blocks until the result may be used: by the host for CPU tensors, by work queued on the current stream for CUDA tensors.
  // Throws TransportError when a peer is gone or `timeout` has passed. Returns at once if idle.
  virtual void wait(std::chrono::milliseconds timeout = kTransportTimeout) = 0;

  // The number of infinities and NaNs in this rank's input to the last operation waited for, if SumOptions::count_non_finite
  // was set.
  virtual int64_t non_finite() const { return 0; }
  // Then also: whether its result is known to contain neither. False if it was not checked.
  virtual bool sums_finite() const { return false; }
  // Forgets a failed operation; the memory it used stays alive for as long as the backend may still write to it.
  virtual void abandon() = 0;
};

}  // namespace torchddp::transport
