// What an engine is made of; and the board, through which the ranks of a host see each other's segments.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/dtype.h"
#include "shm/layout.h"

namespace torchddp::shm {

// Where the segment of a rank is mapped in this process.
struct SegmentView {
  std::byte* base = nullptr;
  int64_t bytes = 0;
};

// The all-reduce between hosts of the shards that one rank of each owns. Operations finish in the order of their start.
class OuterLink {
 public:
  virtual ~OuterLink() = default;
  // `wire`: what the numbers travel as, if not as they are.
  virtual void start(void* data, kernels::DType type, int64_t numel, std::optional<kernels::DType> wire) = 0;
  // True if the oldest is finished: then it is forgotten. Throws TransportError.
  virtual bool finish_oldest() = 0;
};

struct EngineConfig {
  int rank = 0;                       // of this host
  std::vector<SegmentView> segments;  // by rank, this one's included
  std::vector<int> group_ranks;       // what to call them in errors
  std::function<bool(int)> gone;      // whether the process of a rank has exited
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
  OuterLink* outer = nullptr;  // not null if the group spans hosts
  int owners = 0;              // ranks that own shards: all of a single host, the least number on any host otherwise
  int threads = 1;             // to reduce a large block with
  std::function<void(int, const std::function<void()>&)> run_parallel;  // calls it on that many threads
};

// A view of all segments. Decides nothing.
class Board {
 public:
  // `config` must outlive it.
  explicit Board(const EngineConfig& config) : config_(config) {}

  int rank() const { return config_.rank; }
  int size() const { return static_cast<int>(config_.segments.size()); }
  int owners() const { return config_.owners; }
  bool spans() const { return config_.outer != nullptr; }
  // For errors.
  std::string name(int rank) const { return "rank " + std::to_string(config_.group_ranks[static_cast<size_t>(rank)]); }
  // Whether the ranks have fewer processors between them than they are.
  bool is_crowded() const;

  std::byte* base(int rank) const { return config_.segments[static_cast<size_t>(rank)].base; }
  Header& header(int rank) const { return *reinterpret_cast<Header*>(base(rank)); }
  Header& own_header() const { return header(rank()); }
  Slot& slot(int rank, uint64_t seq) const { return header(rank).slots[seq % kSlots]; }
  std::byte* eager_data(int rank, uint64_t seq) const {
    return base(rank) + kHeaderBytes + static_cast<int64_t>(seq % kSlots) * kEagerBytes;
  }
  // Whether so many bytes at `offset` lie where a rank has its blocks.
  bool holds(int rank, int64_t offset, int64_t bytes) const {
    const auto all = config_.segments[static_cast<size_t>(rank)].bytes;
    return offset >= kDataOffset && bytes >= 0 && bytes <= all && offset <= all - bytes;
  }

  // Wakes all who sleep.
  void ring() const;
  // Until somebody rings; returns at once if this rank's doorbell is not `bell` any more.
  void sleep(uint32_t bell, int64_t longest_ns) const;

 private:
  const EngineConfig& config_;
};

}  // namespace torchddp::shm
