// The layout of a rank's shared segment. Every process of a group maps every segment; this is the only protocol between them.
// It begins with a header; more of them, one for each further channel (mesh.h), are among the blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shm/limits.h"
#include "shm/machine.h"

namespace torchddp::shm {

inline constexpr uint64_t kMagic = 0x316d687370646474;  // "tddpshm1" in memory
inline constexpr uint32_t kVersion = 10;                // changes with anything in this file or limits.h
inline constexpr int kMaxRanks = 256;

// Inputs up to kEagerBytes are sent in the post, and sums of which a rank reads no more than this from the others: beyond, owners
// of chunks have less to do.
inline constexpr int64_t kPulledBytes = 3 * kEagerBytes;

enum class OpKind : uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce };
inline constexpr size_t kNumOpKinds = 5;

// How an all-reduce is done.
enum class Form : uint8_t {
  kUsual,     // by the owners of chunks; a small one by every rank
  kEveryone,  // every rank sums all blocks into its own memory, which its block is a copy of
  kQuestion,  // asks before the all-reduce whether all ranks take part and accept
};

// What a rank contributes to an operation.
struct Terms {
  OpKind kind;
  uint8_t type;  // kernels::DType
  uint8_t op;    // kernels::ReduceOp
  uint8_t root;
  Form form = Form::kUsual;
  uint8_t accepts = 0;  // the answer to a kQuestion
  uint8_t counted = 0;  // whether to report infinities and NaNs (Slot::non_finite, Slot::sums_not_finite)
  int64_t numel;        // elements of this rank's input
  double scale = 1.0;   // what the input is multiplied by before it is summed
};

// The location of an input that is not sent in the post: offsets in the rank's segment.
struct Location {
  int64_t offset;
};

// What a rank has to offer. The data begins in the cache line that announces it.
struct alignas(64) Post {
  Atomic<uint64_t> number;  // the operation's number plus one. Written last, read first
  Terms terms;
  std::array<std::byte, kEagerBytes> data;  // the input, or its Location
};

struct Slot {
  Post post;
  // Chunks of an all-reduce that belong to the segment's rank. Any rank may claim them, in order, and marks each one it has
  // finished.
  alignas(64) Atomic<uint64_t> claimed;  // Tally
  alignas(64) Atomic<uint64_t> marks;    // Marks
  // Of the input of the segment's rank, as far as its chunks are summed; the rank that sums one adds to it.
  Atomic<uint64_t> non_finite;
  // Whether the result, as far as it is summed, contains an infinity or NaN: written for every rank if any asks.
  Atomic<uint32_t> sums_not_finite;
};

enum class RankState : uint32_t { kOpen = 1, kClosed, kFailed };

struct alignas(64) Header {
  uint64_t magic;
  uint32_t version;
  uint32_t header_bytes;
  int64_t segment_bytes;
  int32_t rank;
  int32_t size;
  std::array<uint64_t, 16> cpu_mask;  // where this rank may run (the first 1024 processors)
  int32_t quota;                      // how many processors its control group may use at a time; 0: all
  uint64_t quota_group;               // identifies that group

  // Operation counters, in start order; each is written only by the segment's own rank.
  alignas(64) Atomic<uint64_t> done;   // this rank's own work is done; it no longer reads any input
  alignas(64) Atomic<uint64_t> outer;  // between hosts: this rank's shard is final and written to all ranks of the host

  // One for all ranks of the host: the one in the first rank's segment.
  alignas(64) Atomic<uint32_t> doorbell;  // futex: changes when something happened while a rank sleeps
  Atomic<uint32_t> sleeping;              // how many threads of all ranks are asleep
  alignas(64) Atomic<uint32_t> state;     // RankState
  Atomic<int32_t> culprit;                // of kFailed: the rank that was waited for, or -1

  std::array<Slot, kSlots> slots;

  // In a segment's first header: the channels, by number, that its rank has closed.
  std::array<Atomic<uint8_t>, kMaxChannels> closed;
};

inline constexpr int64_t kDataOffset = (static_cast<int64_t>(sizeof(Header)) + 4095) / 4096 * 4096;

static_assert(offsetof(Post, data) == 32);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "atomics in shared memory must not need a lock of one process");

// An operation number and a count in one atomic word, so that a late reader of a slot notices that it now serves another
// operation.
struct Tally {
  static constexpr int kCountBits = 24;
  static constexpr uint64_t pack(uint64_t seq, uint64_t count) { return seq << kCountBits | count; }
  static constexpr uint64_t seq(uint64_t tally) { return tally >> kCountBits; }
  static constexpr uint64_t count(uint64_t tally) { return tally & ((uint64_t{1} << kCountBits) - 1); }
};

// Which of an owner's chunks are done, and for which use of the slot, again for late readers.
struct Marks {
  static constexpr int kMaxChunks = 48;
  static constexpr uint64_t none(uint64_t seq) { return use(seq) << kMaxChunks; }
  static constexpr uint64_t bit(int chunk) { return uint64_t{1} << chunk; }
  static constexpr bool is_of(uint64_t marks, uint64_t seq) { return marks >> kMaxChunks == use(seq); }
  static constexpr bool has_all(uint64_t marks, int chunks) { return (marks & (bit(chunks) - 1)) == bit(chunks) - 1; }

 private:
  static constexpr uint64_t use(uint64_t seq) { return seq / kSlots % (1 << 16); }
};

}  // namespace torchddp::shm
