// The operations of a c10d backend over shared memory, from start to end.
//
// Note [Who finishes a c10d operation]
// Ranks do the work themselves whenever one of their threads is inside a call: wait(), isCompleted(), the next collective. But
// there may be no such call for a long time: a Future is waited for outside of our code, and a Work may be dropped. So each
// backend has one extra thread, the watcher, started by the first asynchronous operation that does not complete at once. It
// sleeps for good when nothing is in flight, checks every few milliseconds what is, and wakes with every message if a Future
// was requested. A callback that requests a Future may wait for it, so then another thread becomes the watcher.
//
// Note [Locks and the GIL]
// Python requests Futures while holding the GIL, so no lock of these operations may be held while waiting for the GIL.
// Releasing a Work (its Future keeps Python callbacks) or a tensor that Python has seen waits for the GIL. Both are therefore
// released with no lock held.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/StringUtil.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "shm/engine.h"
#include "transport/shm/operation_memory.h"
#include "transport/shm/shm_transport.h"

namespace torchddp::shm_backend {

using namespace transport;

class ShmOperations;

// Neither version counters nor graphs need to know about these copies.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard keys{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::NoGradGuard no_grad;
};

// A call of the backend.
struct Description {
  int rank;
  c10d::OpType type;
  const char* title;                        // for profiles: "torchddp_shm:all_reduce"
  std::vector<at::Tensor> inputs, outputs;  // inputs are for profiles, too
  std::chrono::milliseconds timeout;
  bool async;

  // For messages: "all_reduce on rank 3".
  std::string where() const { return c10::str(std::strchr(title, ':') + 1, " on rank ", rank); }
  // What to say when a caller's own limit, shorter than the operation's, has passed.
  std::string not_complete_after(std::chrono::milliseconds limit) const;
};

// Moves the result of an operation to its destination.
inline void deliver(const OperationMemory& memory) {
  if (memory.deliver) {
    const BelowAutograd guard;
    memory.deliver();
  }
}

// An operation of the engine; a collective on several tensors is several.
struct ShmPart : OperationMemory {
  shm::Operation operation;
  std::function<void()> run{};  // several engine operations in its place; complete on return
};

// Thread-safe.
class ShmCollective final : public c10d::Work {
 public:
  ShmCollective(std::shared_ptr<ShmOperations> operations, Description description, std::vector<ShmPart> parts);

  bool isCompleted() override;
  bool isSuccess() const override { return is_over() && c10d::Work::isSuccess(); }
  // The caller's own limit ends the wait, not the operation.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override;
  std::vector<at::Tensor> result() override { return description_.outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return seqs_.empty() ? 0 : seqs_.front(); }

 private:
  friend class ShmOperations;
  using Clock = shm::Engine::Clock;
  using Time = Clock::time_point;
  // In flight in the transport. All of these throw TransportError.
  void start(ShmTransport& transport) {
    for (const auto& part : parts_) {
      if (part.run) {
        part.run();
      } else {
        seqs_.push_back(transport.engine().start(part.operation));
      }
    }
  }
  bool poll(ShmTransport& transport) {
    return std::ranges::all_of(seqs_, [&](uint64_t seq) { return transport.engine().poll(seq); });
  }
  // Raises an error, for all ranks, if the operation's own time limit, counted from `since`, has passed.
  void await(ShmTransport& transport, Time since) {
    for (const auto seq : seqs_) transport.engine().wait(seq, description_.timeout, since);
  }
  // False if it is not complete at `until`. `spin`: as for Engine::wait_for().
  bool await_until(ShmTransport& transport, Time until, bool spin) {
    return std::ranges::all_of(
        seqs_, [&](uint64_t seq) { return transport.engine().wait_for(seq, until - Clock::now(), spin); });
  }
  // What it worked with, to be released without a lock. `failed`: part of it may be in flight.
  std::vector<ShmPart> give_back(ShmTransport& transport, bool failed) {
    for (auto& part : parts_) {
      if (failed) {  // a peer may still write to them
        transport.keep({std::move(part.input), std::move(part.output), std::move(part.staging)});
      }
    }
    return std::exchange(parts_, {});
  }
  bool is_over() const { return over_.load(std::memory_order_acquire); }
  bool is_awaited() const { return awaited_.load(std::memory_order_acquire); }
  bool await_for(ShmTransport& transport, std::chrono::milliseconds longest);
  bool try_finish(ShmTransport& transport, bool wait_for_others);
  // Unless it is over.
  void fail(ShmTransport& transport, std::exception_ptr error) {
    std::unique_lock lock(finishing_);
    if (!is_over()) conclude(transport, error, std::move(lock));
  }
  void fail_at_end(ShmTransport& transport);
  void conclude(ShmTransport& transport, std::exception_ptr error, std::unique_lock<std::mutex> lock);
  void complete(c10::ivalue::Future& future) {
    if (exception_ != nullptr) {
      future.setError(exception_);
    } else {
      future.markCompleted(c10::IValue(description_.outputs));
    }
  }

  std::shared_ptr<ShmOperations> operations_;
  Description description_;
  std::vector<ShmPart> parts_;
  std::vector<uint64_t> seqs_;
  const Time started_ = Clock::now();

  std::mutex finishing_;
  std::atomic<bool> over_{false};
  std::atomic<bool> awaited_{false};  // its Future was requested
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::optional<std::list<c10::intrusive_ptr<ShmCollective>>::iterator> place_;  // among those in flight
};

// The operations in flight, and the watcher. Thread-safe.
class ShmOperations : public std::enable_shared_from_this<ShmOperations> {
 public:
  ShmOperations(std::shared_ptr<ShmTransport> transport, std::chrono::milliseconds timeout);

  // Null after close().
  std::shared_ptr<ShmTransport> transport() const {
    const std::lock_guard lock(mutex_);
    return transport_;
  }
  // The same, or an error that says it is closed.
  std::shared_ptr<ShmTransport> open_transport() const {
    auto transport = this->transport();
    if (transport == nullptr) {
      throw std::runtime_error("the torchddp_shm backend of this process group was shut down");
    }
    return transport;
  }
  std::chrono::milliseconds timeout() const { return timeout_.load(); }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  // An operation that is not asynchronous is over on return.
  void start(const c10::intrusive_ptr<ShmCollective>& work);
  // Waits a while for operations in flight, then releases the shared memory. What was not complete has failed.
  void close() {
    close_later();
    if (getpid() != pid_ || watched_ == this) return;
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [&] { return watchers_ == 0; });
  }
  // The same without waiting: the watcher does it. For destructors, which may hold the GIL.
  void close_later();
  void abort(const std::string& reason) {
    if (const auto transport = this->transport()) {
      transport->engine().interrupt(reason);  // operations in flight report it
    }
  }

 private:
  friend class ShmCollective;
  using Works = std::vector<c10::intrusive_ptr<ShmCollective>>;
  void remove(ShmCollective& work, bool awaited);
  // A thread waits for a Future, so the watcher must be as fast as a wait().
  void attend() {
    std::unique_lock lock(mutex_);
    ++awaited_futures_;
    wake_watcher(lock, is_watcher());
    wake_.notify_all();
  }
  void wake_watcher(std::unique_lock<std::mutex>& lock, bool anew = false);
  bool is_watcher() const { return watcher_ == std::this_thread::get_id(); }
  void watch();
  bool look(ShmTransport& transport, const Works& works);
  void drain_and_drop();
  Works under_way() const {
    const std::lock_guard lock(mutex_);
    return {works_.begin(), works_.end()};
  }

  const int pid_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<ShmTransport> transport_;
  std::list<c10::intrusive_ptr<ShmCollective>> works_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::thread::id watcher_;
  bool dozing_ = false, stop_ = false;
  int awaited_futures_ = 0;
  int watchers_ = 0;  // including former ones that still run callbacks
  // In a thread that is or was a watcher.
  static inline thread_local const ShmOperations* watched_ = nullptr;
};

}  // namespace torchddp::shm_backend
