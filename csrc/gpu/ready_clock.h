// When gradients became ready, by the device's clock; the host runs ahead of the device and can't tell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/device.h"

namespace torchddp::gpu {

// Records one event at the start of forward, one at the start of backward and one per gradient, on the calling thread's current
// stream. mark() follows begin_backward() and may be called from several threads, each with its own indices. Work captured into
// a graph is not measured, because its events mean nothing until it is replayed, and then no one asks.
class ReadyClock {
 public:
  ReadyClock(std::shared_ptr<Device> device, size_t count);
  ~ReadyClock();
  ReadyClock& operator=(ReadyClock&&) = delete;

  void begin_forward();
  void begin_backward();
  void mark(size_t index);
  // By index, in ns since backward began; 0 where nothing was marked. Blocks until the device is idle.
  std::vector<int64_t> read_ns();
  // From the start of forward to the start of backward; 0 if one is missing. Blocks likewise.
  int64_t forward_ns();

 private:
  const std::shared_ptr<Device> device_;
  Event forward_ = nullptr;
  Event begin_ = nullptr;
  std::vector<Event> marks_;
  std::vector<char> is_marked_;
  bool has_forward_ = false;
  bool measures_ = false;
};

}  // namespace torchddp::gpu
