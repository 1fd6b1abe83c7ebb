// What a rank's shared segment looks like. Every process of a group maps every segment; this is their only common language.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace torchddp::shm {

inline constexpr uint64_t kMagic = 0x316d687370646474;  // "tddpshm1" in memory
inline constexpr uint32_t kVersion = 4;                 // changes with anything in this file
inline constexpr int kMaxRanks = 256;

// Operations that may be under way at once. One more waits for the oldest.
inline constexpr uint64_t kSlots = 64;
// Inputs up to this size travel inside the slot: one synchronisation instead of two.
inline constexpr int64_t kEagerBytes = 8192;

enum class OpKind : uint32_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kScatter,
  kAllToAll,
  kAllToAllSplits,
  kReduce
};
inline constexpr size_t kNumOpKinds = 8;

// What a rank brings to an operation. Written before Header::posted moves past it, read by peers after that.
struct Post {
  OpKind kind;
  uint32_t type;  // kernels::DType
  uint32_t op;    // kernels::ReduceOp
  int32_t root;
  int64_t numel;            // elements of this rank's input
  int64_t offset;           // of the input in this rank's segment; 0 for an eager one
  uint32_t wire = 0;        // 1 + kernels::DType of what travels, if that is not `type`
  int64_t wire_offset = 0;  // where it is in this rank's segment
  double scale = 1.0;       // what the input is multiplied by before it is summed
  uint32_t counted = 0;     // whether infinities and NaNs are to be told (Slot::non_finite, Slot::sums_not_finite)
};

// `claimed` and `completed` belong to the shard of an all-reduce that the segment's rank owns: operation number and chunk count,
// packed (Tally). Anybody claims chunks; whoever claimed one completes it.
struct alignas(64) Slot {
  Post post;
  alignas(64) std::atomic<uint64_t> claimed;
  alignas(64) std::atomic<uint64_t> completed;
  // In the input of the segment's rank, as far as its chunks are summed; whoever sums one adds to it.
  std::atomic<uint64_t> non_finite;
  // Whether anything in the result is infinite or NaN, as far as it is summed: told to every rank, if any wants to know.
  std::atomic<uint32_t> sums_not_finite;
};

enum class RankState : uint32_t { kOpen = 1, kClosed, kFailed };

struct alignas(64) Header {
  uint64_t magic;
  uint32_t version;
  uint32_t header_bytes;
  int64_t segment_bytes;
  int32_t rank;
  int32_t size;
  std::array<uint64_t, 16> cpu_mask;  // where this rank may run, the first 1024 processors

  // Counters of operations, in the order of their start; each is written by the segment's own rank alone.
  alignas(64) std::atomic<uint64_t> posted;  // started: slots [0, posted) are filled in
  alignas(64) std::atomic<uint64_t> done;    // this rank's own work is done; it reads nobody's input any more
  alignas(64)
      std::atomic<uint64_t> outer;  // between hosts: this rank's shard is final, and written to all ranks of the host

  alignas(64) std::atomic<uint32_t> doorbell;  // futex: moves when the rank sleeps and something happened
  std::atomic<uint32_t> sleeping;              // how many of the rank's threads are
  alignas(64) std::atomic<uint32_t> state;     // RankState
  std::atomic<int32_t> culprit;                // of kFailed: the rank that was waited for, or -1

  std::array<Slot, kSlots> slots;
};

inline constexpr int64_t kHeaderBytes = (static_cast<int64_t>(sizeof(Header)) + 4095) / 4096 * 4096;
inline constexpr int64_t kDataOffset = kHeaderBytes + static_cast<int64_t>(kSlots) * kEagerBytes;

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "atomics in shared memory must not need a lock of one process");

// An operation number and a count in one atomic word, so that a late reader of a slot sees that it now serves another operation.
struct Tally {
  static constexpr int kCountBits = 24;
  static constexpr uint64_t pack(uint64_t seq, uint64_t count) { return seq << kCountBits | count; }
  static constexpr uint64_t seq(uint64_t tally) { return tally >> kCountBits; }
  static constexpr uint64_t count(uint64_t tally) { return tally & ((uint64_t{1} << kCountBits) - 1); }
};

}  // namespace torchddp::shm
