// What is asked of a CUDA device, as a table: a test puts a recording one in its place, so that the order of events and waits is
// tested on machines without a GPU.
#pragma once

#include <stdexcept>

#include "common/forks.h"

namespace torchddp::gpu {

using Stream = void*;  // cudaStream_t
using Event = void*;   // cudaEvent_t

// The device or its driver failed. Usually no later call succeeds either.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A graph that is being captured does not allow what was asked, or was spoilt before.
class CaptureError : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

// One device. Thread-safe. Nothing blocks the host but synchronize(). Methods throw DeviceError.
class Device {
 public:
  virtual ~Device() = default;

  // torch's current stream of this device in the calling thread.
  virtual Stream current_stream() = 0;
  // Independent of the default stream. What is queued on one of high priority overtakes what waits for room on the device.
  virtual Stream make_stream(bool high_priority) = 0;
  // In a forked child these two do nothing: streams and events are its parent's, and the driver is of no use there.
  void destroy_stream(Stream stream) noexcept {
    if (made_in_ == forks()) {
      drop_stream(stream);
    }
  }
  void destroy_event(Event event) noexcept {
    if (made_in_ == forks()) {
      drop_event(event);
    }
  }

  // Without timing.
  virtual Event make_event() = 0;
  virtual Event make_timing_event() = 0;
  virtual void record(Event event, Stream stream) = 0;
  // What is queued on `stream` from now on starts after what the event was last recorded behind.
  virtual void wait(Stream stream, Event event) = 0;
  // Whether all work that the event was recorded behind is done. Allowed while other threads capture a graph.
  virtual bool finished(Event event) = 0;
  // Between two timing events that are done.
  virtual double elapsed_ms(Event begin, Event end) = 0;
  // Whether `stream` records a graph instead of running what is queued.
  virtual bool capturing(Stream stream) = 0;
  // Blocks until the device is idle.
  virtual void synchronize() = 0;
  // Gives back to the driver what torch's allocator keeps for later and nobody uses.
  virtual void release_cache() = 0;

 private:
  virtual void drop_stream(Stream stream) noexcept = 0;
  virtual void drop_event(Event event) noexcept = 0;

  const int made_in_ = forks();
};

}  // namespace torchddp::gpu
