// When gradients became ready, by the device's own clock: the host, which runs ahead of it, does not know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/device.h"

namespace torchddp::gpu {

// One event for the begin of forward, one for that of backward and one a gradient, recorded on the current stream of the calling
// thread. mark() follows begin_backward() and may be called from several threads, each with indices of its own. What a graph captures is not measured: its events mean
// nothing until it is replayed, and then nobody asks.
class ReadyClock {
 public:
  ReadyClock(std::shared_ptr<Device> device, size_t count);
  ~ReadyClock();
  ReadyClock(const ReadyClock&) = delete;
  ReadyClock& operator=(const ReadyClock&) = delete;

  void begin_forward();
  void begin_backward();
  void mark(size_t index);
  // By index, ns since backward began; 0 where nothing was marked. Blocks until the device is idle.
  std::vector<int64_t> read_ns();
  // From one begin to the other; 0 if one of them is missing. Blocks likewise.
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
