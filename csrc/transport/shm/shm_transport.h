// For ranks of one host and CPU tensors: the bucket is the shared memory.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "common/pace.h"
#include "shm/copier.h"
#include "shm/engine.h"
#include "shm/mesh.h"
#include "shm/segment.h"
#include "transport/shm/gradient_pool.h"
#include "transport/shm/operation_memory.h"
#include "transport/transport.h"

namespace torchddp::transport {

// The placement of ranks, as they have agreed on it.
struct ShmPlacement {
  std::vector<int> local_ranks;        // group ranks of this host, ascending
  std::vector<std::string> addresses;  // of their listeners
  // Between hosts: the ranks with this rank's place on each host; null on a single host, and on a rank that owns no shard.
  c10::intrusive_ptr<c10d::ProcessGroup> outer_group;
  // By group rank: its place among the ranks of its host, and its rank in the outer group of that place (-1: none).
  std::vector<int> places, outer_ranks;
  int owners = 0;      // ranks of each host that own shards
  bool spans = false;  // several hosts
};

// A link through `group`, the ranks that own the same shard on each host. It may still write to the segment after an operation
// has failed and the transport is gone.
std::unique_ptr<shm::OuterLink> make_outer_link(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                std::shared_ptr<shm::Segment> segment);

// An engine with its channel in the mesh, and what must live as long as the engine does.
class ShmChannel {
 public:
  // `ends`: of all ranks of the host.
  ShmChannel(const ShmPlacement& placement, std::shared_ptr<shm::Mesh> mesh, std::vector<shm::ChannelEnd> ends,
             std::chrono::milliseconds timeout);
  ShmChannel(const ShmChannel&) = delete;
  ShmChannel& operator=(const ShmChannel&) = delete;
  ~ShmChannel();

  shm::Engine& engine() { return *engine_; }
  const std::shared_ptr<shm::Mesh>& mesh() const { return mesh_; }
  const shm::ChannelEnd& end() const { return ends_[static_cast<size_t>(mesh_->rank())]; }

  // No one waits any more for an operation whose peers may still use this memory: keeps it until that one is complete, or
  // forever.
  void keep(std::vector<at::Tensor> memory, std::optional<uint64_t> until = std::nullopt);
  void drop_finished();

 private:
  const std::shared_ptr<shm::Mesh> mesh_;
  const std::vector<shm::ChannelEnd> ends_;
  std::unique_ptr<shm::OuterLink> outer_;
  std::unique_ptr<shm::Engine> engine_;
  struct Kept {
    std::vector<at::Tensor> memory;
    std::optional<uint64_t> until;
  };
  std::mutex kept_mutex_;
  std::vector<Kept> kept_;
};

class ShmTransport;

// What the transports of a process group share, for as long as one of them lives: the mesh, and between hosts the channel too.
// There all channels of a host would use one link, whose messages are matched by their order, so operations of several models
// need one order as well: that in which they are started.
class ShmMeeting {
 public:
  // Null if there is none with this limit that belongs to this process.
  std::shared_ptr<shm::Mesh> find(int64_t limit_bytes);
  // Null unless there is one in this mesh that can go on.
  std::shared_ptr<ShmChannel> find_channel(const std::shared_ptr<shm::Mesh>& mesh);
  void set(const std::shared_ptr<shm::Mesh>& mesh, int64_t limit_bytes);
  void set(const std::shared_ptr<ShmChannel>& channel);

 private:
  std::mutex mutex_;
  std::weak_ptr<shm::Mesh> mesh_;
  std::weak_ptr<ShmChannel> channel_;
  int64_t limit_bytes_ = 0;
};

// The name of a rank's mesh ("": none), its end of a channel there, and whether the channel is in use already.
struct ShmOffer {
  std::string mesh;
  shm::ChannelEnd end;
  bool is_shared = false;
};

// The first half of opening the transport: what a rank sends to the others before they connect.
class ShmEndpoint {
 public:
  // `limit_bytes`: of the segment; 0 for as much as the machine has. `meeting`: null if there are no other transports. Throws
  // shm::Unavailable if not even an empty segment can be made.
  ShmEndpoint(int64_t limit_bytes, std::shared_ptr<ShmMeeting> meeting);
  ShmEndpoint(const ShmEndpoint&) = delete;
  ShmEndpoint& operator=(const ShmEndpoint&) = delete;
  ~ShmEndpoint();

  const std::string& address() const { return listener_.address(); }
  ShmOffer offer() const { return mesh_ != nullptr ? ShmOffer{mesh_->name(), *end_, channel_ != nullptr} : ShmOffer{}; }
  // Every rank of the host must call it at about the same time, with what all of them offer (or nothing). Throws
  // shm::Unavailable.
  std::shared_ptr<ShmTransport> connect(c10::intrusive_ptr<c10d::ProcessGroup> group, ShmPlacement placement,
                                        const std::vector<ShmOffer>& offers, std::chrono::milliseconds connect_timeout,
                                        std::chrono::milliseconds timeout);

 private:
  const int64_t limit_bytes_;
  const std::shared_ptr<ShmMeeting> meeting_;
  shm::Listener listener_;
  std::shared_ptr<shm::Mesh> mesh_;
  std::shared_ptr<ShmChannel> channel_;
  std::optional<shm::ChannelEnd> end_;
};

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
  bool reaches(const at::Tensor& tensor) const override;
  bool counts_non_finite(const at::Tensor& tensor) const override;
  void interrupt(const std::string& reason) override;
  void progress() override {
    if (looks_.is_due()) {
      engine_->progress();
    }
  }
  // Includes what went through the process group.
  Traffic traffic() const override;

  void expect_gradients(std::span<const int64_t> sizes) override { pool_->expect(sizes); }
  void begin_backward() override { pool_->set_active(true); }
  void end_backward() override { pool_->set_active(false); }

  bool has_lost_memory() const override { return lost_memory_; }
  std::shared_ptr<Transport> fallback() const override { return c10d_; }

  // See ShmChannel.
  void keep(std::vector<at::Tensor> memory, std::optional<uint64_t> until = std::nullopt) {
    channel_->keep(std::move(memory), until);
  }

  // Of this rank's segment.
  shm::HeldMemory held_memory() const { return segment_->held(); }

  // --- for the c10d backend, which has more operations and reductions ---
  shm::Engine& engine() { return *engine_; }
  shm::Copier& copier() { return copier_; }
  // Throws TransportError if there is no room.
  at::Tensor shared_bytes(int64_t bytes);

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
  at::Tensor allocate_scratch(int64_t bytes, at::Device device) override;

  const ShmPlacement placement_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<Transport> c10d_;  // null without a process group
  const std::shared_ptr<ShmChannel> channel_;
  std::shared_ptr<shm::Segment> segment_;
  std::shared_ptr<GradientPool> pool_;
  shm::Engine* const engine_;  // the channel's
  shm::Copier copier_;
  Pace looks_{kLookInterval};
  const int rank_, size_;
  bool lost_memory_ = false;
  std::array<std::string, shm::kNumOpKinds> titles_;  // by OpKind
};

}  // namespace torchddp::transport
