// How the ranks of a host meet: an engine for each channel in their mesh, and what the transports of a process group share.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shm/engine.h"
#include "shm/mesh.h"

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

// An engine with its channel in the mesh, and what must live as long as the engine does.
class ShmChannel {
 public:
  // `ends`: of all ranks of the host.
  ShmChannel(const ShmPlacement& placement, std::shared_ptr<shm::Mesh> mesh, std::vector<shm::ChannelEnd> ends,
             std::chrono::milliseconds timeout);
  ShmChannel& operator=(ShmChannel&&) = delete;
  ~ShmChannel();

  shm::Engine& engine() { return *engine_; }
  const std::shared_ptr<shm::Mesh>& mesh() const { return mesh_; }
  const shm::ChannelEnd& end() const { return ends_[mesh_->rank()]; }

  // No one waits any more for an operation whose peers may still use this memory: keeps it until that one is complete, or
  // forever.
  void keep(std::vector<at::Tensor> memory, std::optional<uint64_t> until = std::nullopt) {
    const std::lock_guard lock(kept_mutex_);
    kept_.push_back({std::move(memory), until});
  }
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
  std::shared_ptr<shm::Mesh> find(int64_t limit_bytes) {
    const std::lock_guard lock(mutex_);
    auto mesh = limit_bytes == limit_bytes_ ? mesh_.lock() : nullptr;
    return mesh != nullptr && !mesh->is_inherited() ? mesh : nullptr;
  }
  // Null unless there is one in this mesh that can go on.
  std::shared_ptr<ShmChannel> find_channel(const std::shared_ptr<shm::Mesh>& mesh) {
    const std::lock_guard lock(mutex_);
    auto channel = channel_.lock();
    return channel != nullptr && channel->mesh() == mesh && channel->engine().is_open() ? channel : nullptr;
  }
  void set(const std::shared_ptr<shm::Mesh>& mesh, int64_t limit_bytes) {
    const std::lock_guard lock(mutex_);
    mesh_ = mesh;
    limit_bytes_ = limit_bytes;
  }
  void set(const std::shared_ptr<ShmChannel>& channel) {
    const std::lock_guard lock(mutex_);
    channel_ = channel;
  }

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
  ShmEndpoint& operator=(ShmEndpoint&&) = delete;
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

}  // namespace torchddp::transport
