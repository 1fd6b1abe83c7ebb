// Which devices our kernels run on.
#pragma once

#include <map>
#include <mutex>

namespace torchddp::gpu {

// Thread-safe.
class KernelProbe {
 public:
  // Whether find(), an error of CUDA for the current device, is 0. Asked once a device, unless it throws; then warn(error) is called
  // if it is not.
  template <typename Find, typename Warn>
  bool runs_on(int device, Find&& find, Warn&& warn) {
    std::unique_lock lock(mutex_);
    auto found = errors_.find(device);
    const bool first = found == errors_.end();
    if (first) {
      found = errors_.emplace(device, find()).first;
    }
    const int error = found->second;
    lock.unlock();
    if (first && error != 0) {
      warn(error);
    }
    return error == 0;
  }

 private:
  std::mutex mutex_;
  std::map<int, int> errors_;
};

}  // namespace torchddp::gpu
