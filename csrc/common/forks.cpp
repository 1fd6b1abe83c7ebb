#include "common/forks.h"

#include <pthread.h>

#include <atomic>

namespace torchddp {
namespace {

std::atomic<int> count{0};

}  // namespace

int forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1); });
  static_cast<void>(registered);
  return count.load(std::memory_order_relaxed);
}

}  // namespace torchddp
