#include "reducer/queued_futures.h"

#include <utility>

#include "reducer/reduce/future_wait.h"
#include "reducer/report/failure.h"

namespace torchddp::reducer {

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
