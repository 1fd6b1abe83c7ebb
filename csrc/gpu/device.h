// The functions we need of a CUDA device, as an interface: tests replace it with a recording one, so that the order of events
// and waits is tested on machines without a GPU.
#pragma once

#include <source_location>
#include <stdexcept>

#include "common/forks.h"

namespace torchddp::gpu {

using Stream = void*;  // cudaStream_t
using Event = void*;   // cudaEvent_t
using Place = std::source_location;

// The device or its driver failed. Usually every later call fails too.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A graph being captured does not allow the call, or was already invalid.
struct CaptureError : DeviceError {
  using DeviceError::DeviceError;
};

// One device. Thread-safe. Nothing blocks the host but synchronize(). Methods throw DeviceError.
class Device {
 public:
  virtual ~Device() = default;

  // torch's current stream of this device in the calling thread.
  virtual Stream current_stream() = 0;
  // Independent of the default stream. Work on a high-priority stream overtakes work that is waiting for room on the device.
  virtual Stream make_stream(bool high_priority) = 0;
  // In a forked child these two do nothing: streams and events belong to the parent, and the driver does not work there.
  void destroy_stream(Stream stream) noexcept {
    if (made_in_ == forks()) drop_stream(stream);
  }
  void destroy_event(Event event) noexcept {
    if (made_in_ == forks()) drop_event(event);
  }

  // Without timing.
  virtual Event make_event() = 0;
  virtual Event make_timing_event() = 0;
  // `where`, here and below: the caller, for tests that leave out one call at a time.
  virtual void record(Event event, Stream stream, Place where = Place::current()) = 0;
  // What is queued on `stream` from now on starts after the work that the event was last recorded behind.
  virtual void wait(Stream stream, Event event, Place where = Place::current()) = 0;
  // Whether all work that the event was recorded behind is done. Allowed while other threads capture a graph.
  virtual bool finished(Event event) = 0;
  // Between two timing events that are done.
  virtual double elapsed_ms(Event begin, Event end) = 0;
  // Whether `stream` is recording a graph instead of running what is queued.
  virtual bool capturing(Stream stream) = 0;
  // Blocks until all work that the event was recorded behind is done. Allowed while other threads capture a graph.
  virtual void synchronize(Event event) = 0;

 private:
  virtual void drop_stream(Stream stream) noexcept = 0;
  virtual void drop_event(Event event) noexcept = 0;

  const int made_in_ = forks();
};

}  // namespace torchddp::gpu
