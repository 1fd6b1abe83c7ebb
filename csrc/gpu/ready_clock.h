// When gradients became ready, by the device's own clock: the host, which runs ahead of it, does not know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/device.h"

namespace torchddp::gpu {

// One event for the begin and one a gradient, recorded on the current stream of the calling thread. begin() comes first; mark()
// may be called from several threads, each with indices of its own. What a graph captures is not measured: its events mean
// nothing until it is replayed, and then nobody asks.
class ReadyClock {
 public:
  ReadyClock(std::shared_ptr<Device> device, size_t count);
  ~ReadyClock();
  ReadyClock(const ReadyClock&) = delete;
  ReadyClock& operator=(const ReadyClock&) = delete;

  void begin();
  void mark(size_t index);
  // By index, ns since the last begin(); 0 where nothing was marked since. Blocks until the device is idle.
  std::vector<int64_t> read_ns();

 private:
  const std::shared_ptr<Device> device_;
  Event begin_ = nullptr;
  std::vector<Event> marks_;
  std::vector<char> is_marked_;
  bool measures_ = false;
};

}  // namespace torchddp::gpu
