// What a rank's shared segment looks like. Every process of a group maps every segment; this is their only common language.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace torchddp::shm {

inline constexpr uint64_t kMagic = 0x316d687370646474;  // "tddpshm1" in memory
inline constexpr uint32_t kVersion = 7;                 // changes with anything in this file
inline constexpr int kMaxRanks = 256;

// Operations that may be under way at once. One more waits for the oldest.
inline constexpr uint64_t kSlots = 64;
// Inputs up to this size travel in the post: one synchronisation instead of two.
inline constexpr int64_t kEagerBytes = 8192;
// The same for sums that are handed on from group to group, see chain.h.
inline constexpr int64_t kChainBytes = 1024;

enum class OpKind : uint8_t {
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

// How an all-reduce is done.
enum class Form : uint8_t {
  kUsual,     // by the owners of chunks; a small one as its number of ranks wants it
  kEveryone,  // everyone sums all blocks to memory of its own, which its block is a copy of
  kQuestion,  // it is yet to come: the ranks see that they are all in it, and whether all of them accept
};

// What a rank brings to an operation.
struct Terms {
  OpKind kind;
  uint8_t type;      // kernels::DType
  uint8_t op;        // kernels::ReduceOp
  uint8_t wire = 0;  // 1 + kernels::DType of what travels, if that is not `type`
  uint8_t root;
  Form form = Form::kUsual;
  uint8_t accepts = 0;  // of a kQuestion
  uint8_t counted = 0;  // whether infinities and NaNs are to be told (Slot::non_finite, Slot::sums_not_finite)
  int64_t numel;        // elements of this rank's input
  double scale = 1.0;   // what the input is multiplied by before it is summed
};

// Where an input is that does not travel in the post: offsets in the rank's segment.
struct Place {
  int64_t offset;
  int64_t wire_offset = 0;  // of what travels, if that is not `type`
};

// Numbers for other ranks, the first of them in the cache line that says that they are there.
template <int64_t kBytes>
struct alignas(64) Parcel {
  std::atomic<uint64_t> number;  // of the operation they belong to, plus one. Written last, read first
  Terms terms;
  std::array<std::byte, kBytes> data;
};
// How many cache lines that are, with so much data.
constexpr int64_t parcel_lines(int64_t data_bytes) { return (32 + data_bytes + 63) / 64; }
using Post = Parcel<kEagerBytes>;  // `data` is the input, or its Place
using Sum = Parcel<kChainBytes>;

// Chunks of an all-reduce that the segment's rank owns. Anybody claims them, in their order; whoever claimed one marks it when it is
// done.
struct Stage {
  alignas(64) std::atomic<uint64_t> claimed;  // Tally
  alignas(64) std::atomic<uint64_t> marks;    // Marks
};

struct Slot {
  Post post;
  Sum partial;  // of all ranks up to the last of the group that the segment's rank leads
  Sum total;    // of all ranks
  Stage sums;
  Stage copies;
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
  int32_t node;                       // of memory, next to those processors
  int32_t quota;                      // processors that its control group may use at a time; 0: all
  uint64_t quota_group;               // which group that is

  // Counters of operations, in the order of their start; each is written by the segment's own rank alone.
  alignas(64) std::atomic<uint64_t> done;  // this rank's own work is done; it reads nobody's input any more
  alignas(64)
      std::atomic<uint64_t> outer;  // between hosts: this rank's shard is final, and written to all ranks of the host

  // One for all ranks of the host, those of its first.
  alignas(64) std::atomic<uint32_t> doorbell;  // futex: moves when somebody sleeps and something happened
  std::atomic<uint32_t> sleeping;              // how many threads of all ranks are
  alignas(64) std::atomic<uint32_t> state;     // RankState
  std::atomic<int32_t> culprit;                // of kFailed: the rank that was waited for, or -1

  std::atomic<int64_t> mail;  // where this rank's MailBox is; 0: it has none yet

  std::array<Slot, kSlots> slots;
};

inline constexpr int64_t kDataOffset = (static_cast<int64_t>(sizeof(Header)) + 4095) / 4096 * 4096;

static_assert(offsetof(Post, data) == 32);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "atomics in shared memory must not need a lock of one process");

// An operation number and a count in one atomic word, so that a late reader of a slot sees that it now serves another operation.
struct Tally {
  static constexpr int kCountBits = 24;
  static constexpr uint64_t pack(uint64_t seq, uint64_t count) { return seq << kCountBits | count; }
  static constexpr uint64_t seq(uint64_t tally) { return tally >> kCountBits; }
  static constexpr uint64_t count(uint64_t tally) { return tally & ((uint64_t{1} << kCountBits) - 1); }
};

// Which of an owner's chunks are done, and of which use of the slot: the same for a late reader.
struct Marks {
  static constexpr int kMaxChunks = 48;
  static constexpr uint64_t none(uint64_t seq) { return use(seq) << kMaxChunks; }
  static constexpr uint64_t bit(int chunk) { return uint64_t{1} << chunk; }
  static constexpr bool is_of(uint64_t marks, uint64_t seq) { return marks >> kMaxChunks == use(seq); }
  static constexpr bool has(uint64_t marks, int chunk) { return (marks & bit(chunk)) != 0; }
  static constexpr bool has_all(uint64_t marks, int chunks) { return (marks & (bit(chunks) - 1)) == bit(chunks) - 1; }

 private:
  static constexpr uint64_t use(uint64_t seq) { return seq / kSlots % (1 << 16); }
};

}  // namespace torchddp::shm
