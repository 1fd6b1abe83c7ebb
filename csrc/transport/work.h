// The handle of one collective operation.
#pragma once

#include <chrono>

namespace torchddp::transport {

// Wait as long as the transport's own time limit allows (for c10d: the process group's timeout).
inline constexpr std::chrono::milliseconds kTransportTimeout{0};

// A Work is made once (Transport::make_work) and restarted by every collective it is passed to, so that a steady training step
// allocates nothing. One collective at a time; not thread-safe.
class Work {
 public:
  virtual ~Work() = default;
  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  // True when nothing is under way: finished, failed (then wait() throws), or never started. Never blocks.
  virtual bool poll() = 0;

  // Blocks until the result may be used: by the host for CPU tensors, by work queued on the current stream for CUDA tensors.
  // Throws TransportError when a peer is gone or `timeout` has passed. Idle handles return at once.
  virtual void wait(std::chrono::milliseconds timeout = kTransportTimeout) = 0;

  // Infinities and NaNs in this rank's input to the operation that was waited for last, if SumOptions::count_non_finite asked for it.
  virtual int64_t non_finite() const { return 0; }
  // Then also: whether its result is known to hold neither. False where nobody looked.
  virtual bool sums_finite() const { return false; }
  // Forgets an operation that failed; the memory it used stays alive for as long as the backend may still write to it.
  virtual void abandon() = 0;
};

}  // namespace torchddp::transport
