// An engine's configuration, and the board: this rank's view of every segment of the host.
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

// Where the segment of a rank is mapped in this process, and where in it the engine's header is.
struct SegmentView {
  std::byte* base = nullptr;
  int64_t bytes = 0;
  int64_t header = 0;
};

// The all-reduce between hosts of the shards that one rank on each host owns. Operations finish in the order they start.
class OuterLink {
 public:
  virtual ~OuterLink() = default;
  // `sent`: the type in which values are sent, if not their own.
  virtual void start(void* data, kernels::DType type, int64_t numel, std::optional<kernels::DType> sent) = 0;
  // True if the oldest operation has finished; it is then forgotten. Throws TransportError.
  virtual bool finish_oldest() = 0;
};

struct EngineConfig {
  int rank = 0;                       // of this host
  std::vector<SegmentView> segments;  // by rank, this one's included
  std::vector<int> group_ranks;       // their names in errors
  std::function<bool(int)> gone;      // whether the process of a rank has exited
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
  // How long a peer that gave up without naming a culprit is not itself blamed.
  std::chrono::milliseconds reason_patience{500};
  OuterLink* outer = nullptr;  // not null if the group spans hosts
  int owners = 0;              // ranks that own shards: all on a single host, otherwise the smallest number on any host
  int threads = 1;             // for reducing a large block
  std::function<void(int, const std::function<void()>&)> run_parallel;  // calls it on that many threads

  // Whether this much work is worth more than one thread.
  bool is_parallel(int64_t bytes) const { return threads > 1 && bytes >= (4 << 20); }
};

// A view of all segments. Makes no decisions.
class Board {
 public:
  // `config` must outlive it.
  explicit Board(const EngineConfig& config) : config_(config) {}

  int rank() const { return config_.rank; }
  int size() const { return static_cast<int>(config_.segments.size()); }
  int owners() const { return config_.owners; }
  bool spans() const { return config_.outer != nullptr; }
  // For errors.
  std::string name(int rank) const { return "rank " + std::to_string(config_.group_ranks[rank]); }
  RankState state(int rank) const { return static_cast<RankState>(header(rank).state.load()); }
  // Whether the ranks have fewer processors in total than there are ranks.
  bool is_crowded() const;

  std::byte* base(int rank) const { return config_.segments[rank].base; }
  Header& header(int rank) const {
    const auto& segment = config_.segments[rank];
    return *reinterpret_cast<Header*>(segment.base + segment.header);
  }
  Header& own_header() const { return header(rank()); }
  Slot& slot(int rank, uint64_t seq) const { return header(rank).slots[seq % kSlots]; }
  // Whether a rank has started an operation, so that its post can be read.
  bool has_posted(int rank, uint64_t seq) const { return slot(rank, seq).post.number.load() > seq; }
  // Whether this many bytes at `offset` lie within the part of the segment where a rank has its blocks.
  bool holds(int rank, int64_t offset, int64_t bytes) const {
    const auto all = config_.segments[rank].bytes;
    return offset >= kDataOffset && bytes >= 0 && bytes <= all && offset <= all - bytes;
  }

  // Moves `next` to the first rank from there on that fails the test. True if none does.
  template <class Test>
  bool all_from(int& next, Test&& test) const {
    while (next < size() && test(next)) ++next;
    return next == size();
  }
  template <class Test>
  bool all_of_ranks(Test&& test) const {
    int first = 0;
    return all_from(first, test);
  }

  // Wakes all sleeping ranks with one system call. What they wait for must have been stored before, sequentially consistent.
  void ring() const;
  bool has_sleepers() const { return header(0).sleeping.load() != 0; }
  // To sleep: begin_sleep(), check once more that there is nothing to do, sleep() until the doorbell rings after begin_sleep()
  // or the time is up, then end_sleep().
  uint32_t begin_sleep() const;
  void sleep(uint32_t bell, int64_t longest_ns) const;
  void end_sleep() const { header(0).sleeping.fetch_sub(1); }

 private:
  const EngineConfig& config_;
};

}  // namespace torchddp::shm
