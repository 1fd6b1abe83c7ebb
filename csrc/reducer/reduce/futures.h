// Futures, which their owners may never complete.
#pragma once

#include <ATen/core/ivalue.h>

#include <mutex>
#include <vector>

#include "reducer/base/context.h"
#include "reducer/report/events.h"

namespace torchddp::reducer {

// Returns once it is complete, successfully or not. After the time limit of the module or its group, throws a TransportError
// that names `what`.
void wait_for_future(const Context& context, c10::ivalue::Future& future, const char* what);

// Those that communication hooks queued for the end of backward (torch's _install_post_backward_futures).
class QueuedFutures {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  QueuedFutures(const Context& context, const StepEvents& events) : context_(context), events_(events) {}

  // Thread-safe.
  void add(const std::vector<FuturePtr>& futures);
  // Waits for all of them and throws the first error.
  void wait();
  void abandon();

 private:
  std::vector<FuturePtr> take();

  const Context& context_;
  const StepEvents& events_;
  std::mutex mutex_;
  std::vector<FuturePtr> futures_;
};

}  // namespace torchddp::reducer
