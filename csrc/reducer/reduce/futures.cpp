#include "reducer/reduce/futures.h"

#include <utility>

#include "common/check.h"
#include "reducer/report/messages.h"
#include "transport/c10d/group_work.h"

namespace torchddp::reducer {

void wait_for_future(const Context& context, c10::ivalue::Future& future, const char* what) {
  const auto& interruption = context.transport->interruption();
  if (future.completed()) {
    interruption.check();
    return;
  }
  const bool own_limit = context.config.timeout != transport::kTransportTimeout;
  const auto limit = own_limit ? context.config.timeout : transport::timeout_of(*context.group, context.param_device());
  if (!transport::wait_or_keep(context.group, [&] { return interruption.wait_for(future, limit); })) {
    throw TransportError(c10::str(what, " was not completed within ", limit.count(), " ms, the timeout of ",
                                  own_limit ? "this DistributedDataParallel" : "the process group"));
  }
}

void QueuedFutures::add(const std::vector<FuturePtr>& futures) {
  const std::lock_guard lock(mutex_);
  futures_.insert(futures_.end(), futures.begin(), futures.end());
}

std::vector<QueuedFutures::FuturePtr> QueuedFutures::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(futures_, {});
}

void QueuedFutures::wait() {
  const auto futures = take();
  for (size_t i = 0; i < futures.size(); ++i) {
    const WaitScope waits(events_.live(), "what was queued after backward");
    described_in_step(context_, events_,
                      c10::str("what was queued after backward (", i + 1, " of ", futures.size(), ")"),
                      [&] { wait_for_future(context_, *futures[i], "its future"); });
    futures[i]->wait();
    if (futures[i]->hasError()) {
      std::rethrow_exception(futures[i]->exception_ptr());
    }
  }
}

void QueuedFutures::abandon() { take(); }

}  // namespace torchddp::reducer
