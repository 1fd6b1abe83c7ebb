// Which devices our kernels run on.
#pragma once

#include <map>
#include <mutex>

namespace torchddp::gpu {

// Thread-safe.
class KernelProbe {
 public:
  // Whether find(), which returns a CUDA error for the current device, returns 0. Called once per device unless it throws; if
  // the result is not 0, warn(error) is called.
  template <typename Find, typename Warn>
  bool runs_on(int device, Find&& find, Warn&& warn) {
    std::unique_lock lock(mutex_);
    auto found = errors_.find(device);
    const bool first = found == errors_.end();
    if (first) found = errors_.emplace(device, find()).first;
    const int error = found->second;
    lock.unlock();
    if (first && error != 0) warn(error);
    return error == 0;
  }

 private:
  std::mutex mutex_;
  std::map<int, int> errors_;
};

}  // namespace torchddp::gpu
