#include "shm_backend/work.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/deadline.h"

namespace torchddp::shm_backend {
namespace {

using Clock = shm::Engine::Clock;
using std::chrono::milliseconds;

// How often the watcher checks operations without a Future.
constexpr milliseconds kLook{5};
constexpr std::chrono::microseconds kMoment{100};
// Checks with nothing in flight before it sleeps for good.
constexpr int kIdleLooks = 20;
// How long close() waits for the other ranks: they leave at about the same time, or one of them has failed.
constexpr milliseconds kFarewell{10'000};

}  // namespace

std::string Description::not_complete_after(milliseconds limit) const {
  return c10::str("rank ", rank, ": ", c10d::opTypeToString(type), " was not complete ", limit.count(),
                  " ms after wait(). The operation and the process group continue");
}

ShmCollective::ShmCollective(std::shared_ptr<ShmOperations> operations, Description description,
                             std::vector<ShmPart> parts)
    : Work(description.rank, description.type, description.title, description.inputs),
      operations_(std::move(operations)), description_(std::move(description)), parts_(std::move(parts)) {
  description_.inputs.clear();
}

bool ShmCollective::isCompleted() {
  if (is_over()) return true;
  const auto transport = operations_->transport();
  return transport != nullptr && try_finish(*transport, false);
}

bool ShmCollective::wait(milliseconds timeout) {
  const auto transport = is_over() ? nullptr : operations_->transport();
  if (transport != nullptr && !await_for(*transport, timeout)) {
    throw TransportError(description_.not_complete_after(timeout));
  }
  const std::lock_guard lock(finishing_);  // another thread may be about to report that it is over
  TDDP_INTERNAL(is_over(), "a wait for an operation ended before the operation");
  if (exception_ != nullptr) std::rethrow_exception(exception_);
  return true;
}

// False if the caller's own time is up.
bool ShmCollective::await_for(ShmTransport& transport, milliseconds longest) {
  try {
    if (longest <= kNoTimeout) {
      await(transport, Clock::now());
    } else if (!await_until(transport, deadline_after(longest), true)) {
      return false;
    }
  } catch (const TransportError&) {
    fail(transport, std::current_exception());
  }
  try_finish(transport, true);
  return true;
}

void ShmCollective::abort() { operations_->abort(c10::str("rank ", rank_, " aborted an operation")); }

c10::intrusive_ptr<c10::ivalue::Future> ShmCollective::getFuture() {
  std::unique_lock lock(finishing_);
  if (future_ == nullptr) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (is_over()) {
      complete(*future_);
    } else {
      awaited_.store(true, std::memory_order_release);
      operations_->attend();
    }
  }
  return future_;
}

// Whether it is over, successfully or not. `wait_for_others`: also if another thread is just ending it.
bool ShmCollective::try_finish(ShmTransport& transport, bool wait_for_others) {
  std::unique_lock lock(finishing_, std::defer_lock);
  if (wait_for_others) {
    lock.lock();
  } else if (!lock.try_lock()) {
    return is_over();
  }
  if (is_over()) return true;
  std::exception_ptr error;
  try {
    if (!poll(transport)) return false;
    std::ranges::for_each(parts_, deliver);
  } catch (...) {
    error = std::current_exception();
  }
  conclude(transport, error, std::move(lock));
  return true;
}

void ShmCollective::fail_at_end(ShmTransport& transport) {
  fail(transport,
       std::make_exception_ptr(TransportError(c10::str("rank ", transport.rank(), " left the process group before ",
                                                       c10d::opTypeToString(opType_), " was complete"))));
}

void ShmCollective::conclude(ShmTransport& transport, std::exception_ptr error, std::unique_lock<std::mutex> lock) {
  auto memory = give_back(transport, error != nullptr);
  finish(error);
  over_.store(true, std::memory_order_release);
  const auto future = future_;
  lock.unlock();  // callbacks may ask for this same operation
  memory.clear();
  operations_->remove(*this, future != nullptr);
  if (future != nullptr) complete(*future);
}

ShmOperations::ShmOperations(std::shared_ptr<ShmTransport> transport, milliseconds timeout)
    : pid_(getpid()), transport_(std::move(transport)), timeout_(timeout) {}

void ShmOperations::start(const c10::intrusive_ptr<ShmCollective>& work) {
  const auto transport = open_transport();
  try {
    work->start(*transport);
    if (!work->description_.async) {
      work->wait();
      return;
    }
  } catch (...) {
    work->fail(*transport, std::current_exception());
    throw;
  }
  if (!work->try_finish(*transport, true)) {
    std::unique_lock lock(mutex_);
    if (!stop_) {
      work->place_ = works_.insert(works_.end(), work);
      wake_watcher(lock);
      return;
    }
    lock.unlock();
    work->fail_at_end(*transport);  // nobody would look at it any more
  }
}

void ShmOperations::remove(ShmCollective& work, bool awaited) {
  if (!work.place_) return;                // it was over before any other thread could see it
  c10::intrusive_ptr<ShmCollective> last;  // released without holding the lock
  const std::lock_guard lock(mutex_);
  last = std::move(**work.place_);
  works_.erase(*work.place_);
  awaited_futures_ -= awaited ? 1 : 0;
}

void ShmOperations::wake_watcher(std::unique_lock<std::mutex>& /*held*/, bool anew) {
  if (anew || watcher_ == std::thread::id()) {
    std::thread watcher([self = shared_from_this()] { self->watch(); });
    ++watchers_;
    watcher_ = watcher.get_id();
    watcher.detach();
  } else if (dozing_) {
    dozing_ = false;
    wake_.notify_all();
  }
}

void ShmOperations::watch() {
  pthread_setname_np(pthread_self(), "torchddp_shm");
  watched_ = this;
  std::unique_lock lock(mutex_);
  for (int idle = 0; !stop_ && is_watcher();) {
    idle = works_.empty() ? idle + 1 : 0;
    if (idle > kIdleLooks) {
      dozing_ = true;
      wake_.wait(lock, [&] { return stop_ || !dozing_; });
      idle = 0;
    }
    if (awaited_futures_ == 0) wake_.wait_for(lock, kLook, [&] { return stop_ || awaited_futures_ > 0; });
    if (stop_) break;
    auto transport = transport_;
    lock.unlock();
    const bool slept = transport != nullptr && look(*transport, under_way());
    transport.reset();
    lock.lock();
    if (!slept && awaited_futures_ > 0) {
      wake_.wait_for(lock, kMoment, [&] { return stop_; });  // another thread is just ending it
    }
  }
  if (is_watcher()) {
    lock.unlock();
    drain_and_drop();
    lock.lock();
  }
  --watchers_;
  wake_.notify_all();
}

// Ends what can be ended. If a Future is waited for, sleeps until something happens to the first such operation; returns
// whether it did.
bool ShmOperations::look(ShmTransport& transport, const Works& works) {
  ShmCollective* awaited = nullptr;
  for (const auto& work : works) {
    const bool over = work->try_finish(transport, false);
    if (!over && awaited == nullptr && work->is_awaited()) awaited = work.get();
  }
  if (awaited == nullptr) return false;
  try {
    if (!awaited->await_until(transport, Clock::now() + kLook, false) &&
        Clock::now() >= deadline_after(awaited->description_.timeout, awaited->started_)) {
      awaited->await(transport, awaited->started_);
    }
  } catch (const TransportError&) {
    // Each operation reports it when it is next checked.
  }
  return true;
}

// The end of the backend, in the watcher if there is one.
void ShmOperations::drain_and_drop() {
  const auto transport = this->transport();
  if (transport == nullptr) return;
  const auto deadline = Clock::now() + std::min(kFarewell, timeout());
  for (const auto& work : under_way()) {
    try {
      work->await_until(*transport, deadline, false);
    } catch (const TransportError&) {
      // try_finish() reports it.
    }
    if (!work->try_finish(*transport, true)) work->fail_at_end(*transport);
  }
  std::shared_ptr<ShmTransport> last;  // released without holding the lock
  const std::lock_guard lock(mutex_);
  last.swap(transport_);
}

void ShmOperations::close_later() {
  if (getpid() != pid_) return;  // a forked child: there is no watcher, and the rank lives on in the parent
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(stop_, true)) return;
    wake_.notify_all();
    if (watcher_ != std::thread::id()) return;
  }
  drain_and_drop();
}

}  // namespace torchddp::shm_backend
