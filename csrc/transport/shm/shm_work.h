// The operations of a c10d backend over shared memory, from their start to their end.
//
// Note [Who finishes a c10d operation]
// Ranks do the work themselves, whenever one of their threads passes by: in wait(), in isCompleted(), in the next collective. Nobody
// may pass by for long: a Future is only ever waited for outside of our code, and a Work may be dropped. So each backend has one
// thread more, the watcher, started by the first asynchronous operation that is not complete at once. It sleeps for good when nothing is under way, looks every
// few milliseconds at what is, and wakes with every message where a Future was asked for.
//
// Note [Locks and the GIL]
// Python asks for Futures with the GIL in its hands, so no lock of these operations may be held while the GIL is waited for. It is
// waited for by whoever lets go of a Work (its Future keeps Python callbacks) or of a tensor that Python has seen. Both are let go of
// with no lock held.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "shm/engine.h"
#include "transport/shm/operation_memory.h"

namespace torchddp::transport {

class ShmOperations;
class ShmTransport;

// Neither version counters nor graphs have to know what is copied.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard keys{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::NoGradGuard no_grad;
};

// Thread-safe.
class ShmC10dWork : public c10d::Work {
 public:
  struct Description {
    c10d::OpType type;
    const char* title;  // for profiles
    std::vector<at::Tensor> inputs, outputs;
    std::chrono::milliseconds timeout;
    bool async;
  };

  ShmC10dWork(std::shared_ptr<ShmOperations> operations, int rank, Description description);

  bool isCompleted() override;
  bool isSuccess() const override;
  // A limit of its own ends the waiting, not the operation.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 protected:
  using Time = shm::Engine::Clock::time_point;
  // Under way in the transport. All of it throws TransportError.
  virtual void start(ShmTransport& transport) = 0;
  virtual bool poll(ShmTransport& transport) = 0;
  // An error, for all ranks, when the operation's own time is up, counted from `since`.
  virtual void await(ShmTransport& transport, Time since) = 0;
  // False if it is not complete at `until`. `spin`: as for Engine::wait_for().
  virtual bool await_until(ShmTransport& transport, Time until, bool spin) = 0;
  // Complete: the result to where it is wanted.
  virtual void deliver() = 0;
  // What it worked with, to be let go of without a lock. `failed`: part of it may be under way.
  virtual std::shared_ptr<void> give_back(ShmTransport& transport, bool failed) = 0;

  const std::vector<at::Tensor> outputs_;
  const std::chrono::milliseconds timeout_;

 private:
  friend class ShmOperations;
  bool is_over() const { return over_.load(std::memory_order_acquire); }
  bool is_awaited() const { return awaited_.load(std::memory_order_acquire); }
  bool await_for(ShmTransport& transport, std::chrono::milliseconds longest);
  bool try_finish(ShmTransport& transport, bool wait_for_others);
  void fail(ShmTransport& transport, std::exception_ptr error);
  void conclude(ShmTransport& transport, std::exception_ptr error, std::unique_lock<std::mutex> lock);
  void complete(c10::ivalue::Future& future);

  std::shared_ptr<ShmOperations> operations_;
  const bool async_;
  const Time started_ = shm::Engine::Clock::now();

  std::mutex finishing_;
  std::atomic<bool> over_{false};
  std::atomic<bool> awaited_{false};  // somebody has its Future
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::optional<std::list<c10::intrusive_ptr<ShmC10dWork>>::iterator> place_;  // among those under way
};

// An operation of the engine; a collective on several tensors is several.
struct ShmPart : OperationMemory {
  shm::Operation operation;
  std::function<void()> run{};  // of several of the engine's in its place; complete on return
};

class ShmCollective final : public ShmC10dWork {
 public:
  ShmCollective(std::shared_ptr<ShmOperations> operations, int rank, Description description,
                std::vector<ShmPart> parts)
      : ShmC10dWork(std::move(operations), rank, std::move(description)), parts_(std::move(parts)) {}
  uint64_t getSequencenumber() const override { return seqs_.empty() ? 0 : seqs_.front(); }

 private:
  void start(ShmTransport& transport) override;
  bool poll(ShmTransport& transport) override;
  void await(ShmTransport& transport, Time since) override;
  bool await_until(ShmTransport& transport, Time until, bool spin) override;
  void deliver() override;
  std::shared_ptr<void> give_back(ShmTransport& transport, bool failed) override;

  std::vector<ShmPart> parts_;
  std::vector<uint64_t> seqs_;
};

// What is under way, and the watcher. Thread-safe.
class ShmOperations : public std::enable_shared_from_this<ShmOperations> {
 public:
  ShmOperations(std::shared_ptr<ShmTransport> transport, std::chrono::milliseconds timeout);
  ~ShmOperations();

  // Null after close().
  std::shared_ptr<ShmTransport> transport() const;
  // The same, or an error that says so.
  std::shared_ptr<ShmTransport> open_transport() const;
  std::chrono::milliseconds timeout() const { return timeout_.load(); }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  // An operation that is not asynchronous is over on return.
  void start(const c10::intrusive_ptr<ShmC10dWork>& work);
  // Waits a while for what is under way, then lets go of the shared memory. What was not complete has failed.
  void close();
  // The same, without waiting: the watcher does it. For destructors, which may hold the GIL.
  void close_later();
  void abort(const std::string& reason);

 private:
  friend class ShmC10dWork;
  using Works = std::vector<c10::intrusive_ptr<ShmC10dWork>>;
  void remove(ShmC10dWork& work, bool awaited);
  void attend();
  void wake_watcher(std::unique_lock<std::mutex>& lock);
  void watch();
  bool look(ShmTransport& transport, const Works& works);
  void drain_and_drop();
  Works under_way() const;

  const int pid_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<ShmTransport> transport_;
  std::list<c10::intrusive_ptr<ShmC10dWork>> works_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::thread watcher_;
  bool watching_ = false, dozing_ = false, stop_ = false;
  int awaited_futures_ = 0;
};

}  // namespace torchddp::transport
