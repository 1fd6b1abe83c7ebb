// For ranks of one host and CPU tensors: the bucket is the shared memory.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "shm/copier.h"
#include "transport/shm/gradient_pool.h"
#include "transport/shm/operation_memory.h"
#include "transport/shm/shm_channel.h"
#include "transport/transport.h"

namespace torchddp::transport {

// The minimum interval at which hooks check on the peers. A check takes the engine's mutex and a cache line from each peer's
// processor, some tenths of a microsecond and more with more peers, and a step has hundreds of hooks. What it may find is a
// shard to sum, which takes longer than this. Waits check on their own, so the end of backward is not delayed.
inline constexpr std::chrono::microseconds kLookInterval{5};

// What shared memory can't do (sparse tensors, other devices, dtypes that can't be summed, collectives between hosts other than
// all-reduce) goes through the process group. The choice depends only on what is equal on all ranks. Memory that is not shared
// is copied in and out.
class ShmTransport final : public Transport, public std::enable_shared_from_this<ShmTransport> {
 public:
  // `timeout`: of operations whose own is kTransportTimeout; 0: the channel's.
  ShmTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, ShmPlacement placement,
               std::shared_ptr<ShmChannel> channel, std::chrono::milliseconds timeout);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  // In the segment; if that has no room, in private memory with a warning (see has_lost_memory).
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, at::Device device) override;
  std::unique_ptr<Work> make_work() override;
  bool reaches(const at::Tensor& tensor) const override {
    return segment_->contains(tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
  }
  bool counts_non_finite(const at::Tensor& tensor) const override;
  void interrupt(const std::string& reason) override {
    Transport::interrupt(reason);
    engine_->interrupt(reason);
    if (c10d_ != nullptr) c10d_->interrupt(reason);
  }
  void progress() override {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    auto due = next_look_.load(std::memory_order_relaxed);
    if (now < due) return;
    if (next_look_.compare_exchange_strong(due, now + kLookInterval, std::memory_order_relaxed)) engine_->progress();
  }
  // Includes what went through the process group.
  Traffic traffic() const override {
    auto total = Transport::traffic();
    if (c10d_ != nullptr) total += c10d_->traffic();
    return total;
  }

  void expect_gradients(std::span<const int64_t> sizes) override { pool_->expect(sizes); }
  void begin_backward() override { pool_->set_active(true); }
  void end_backward() override { pool_->set_active(false); }
  void trim_gradients(int64_t bytes) override { pool_->trim(bytes); }

  bool has_lost_memory() const override { return lost_memory_; }
  std::shared_ptr<Transport> fallback() const override { return c10d_; }

  // See ShmChannel.
  void keep(std::vector<at::Tensor> memory, std::optional<uint64_t> until = std::nullopt) {
    channel_->keep(std::move(memory), until);
  }

  // --- for the c10d backend, which has more operations and reductions ---
  shm::Engine& engine() { return *engine_; }
  shm::Copier& copier() { return copier_; }
  // Throws TransportError if there is no room. `for_all`: the other ranks wait for what needs it, and also get the error.
  at::Tensor shared_bytes(int64_t bytes, bool for_all = false);

 private:
  friend class ShmWork;
  void launch(const Collective& operation, Work& work) override;
  bool goes_through_group(const Collective& operation) const;
  void start_sum(const Collective& sum, Work& work);
  void start_broadcast(const at::Tensor& tensor, int root, Work& work);
  void run(Work& work, shm::Operation operation, const at::Tensor& input, const at::Tensor& output);
  at::Tensor try_allocate(int64_t numel, at::ScalarType dtype);
  void broadcast_between_hosts(const at::Tensor& tensor, int root);
  void count_operation(const shm::Operation& operation);
  at::Tensor allocate_scratch(int64_t bytes, at::Device device) override {
    return device.is_cpu() ? shared_bytes(bytes, /*for_all=*/true) : Transport::allocate_scratch(bytes, device);
  }

  const ShmPlacement placement_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<Transport> c10d_;  // null without a process group
  const std::shared_ptr<ShmChannel> channel_;
  std::shared_ptr<shm::Segment> segment_;
  std::shared_ptr<GradientPool> pool_;
  shm::Engine* const engine_;  // the channel's
  shm::Copier copier_;
  std::atomic<std::chrono::steady_clock::duration> next_look_{};
  const int rank_, size_;
  bool lost_memory_ = false;
  std::array<std::string, shm::kNumOpKinds> titles_;  // by OpKind
};

}  // namespace torchddp::transport
