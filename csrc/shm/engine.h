// Collective operations between processes that map each other's segments.
//
// Note [How ranks of one host work together]
// Every rank starts the same operations in the same order; the n-th is number n everywhere and uses slot n % kSlots of each
// segment. To start one is to fill in one's own slot and to count `posted` up. Nobody is asked for anything: whoever sees that
// all inputs of an operation are posted does its own part of the work, in any call that passes by (start, progress, wait).
//
//   all-reduce of a block in the segment   rank s owns shard s of everybody's block. It sums the shard over all ranks, in rank
//     order, chunk by chunk, and writes each chunk to all blocks while it is in cache. Who waits with nothing else to do takes
//     chunks of other ranks' shards, so that a rank that is not running holds nobody up. Complete when all chunks are.
//   small all-reduce (kEagerBytes)         the input travels in the slot; each rank sums all inputs itself. Complete with that.
//   reduce                                 the root alone sums all blocks into its own. Complete with that for the root; elsewhere when
//     the root has done so.
//   the others                             each rank reads what it needs from the slots or blocks of the others. In an
//     all-to-all with splits a block begins with a table of who gets what (split_table_bytes). Complete
//     when no peer reads one's block any more; at once if the input travelled in the slot.
//   all-reduce between hosts               ranks own shards as above, but write only their own block at first; the outer link
//     sums the shard with the other hosts', and then it is written to all blocks of this host.
//
// The order of summation is the ranks' own, whoever sums and whenever: results are the same bit for bit in each run.
//
// Note [Trust]
// A peer may die at any instruction, or hand us garbage. Whatever is read from another segment is copied once and checked before
// it is used as an address; segments can't shrink. A dead peer is noticed by its process handle, between sleeps; a wrong one may
// spoil sums, and no more.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/errors.h"
#include "common/round_up.h"
#include "common/signals.h"
#include "kernels/sum.h"
#include "shm/layout.h"

namespace torchddp::shm {

// As torch names it.
const char* kind_name(OpKind kind);

// Where the segment of a rank is mapped in this process.
struct SegmentView {
  std::byte* base = nullptr;
  int64_t bytes = 0;
};

// What is infinite or NaN in an operation.
struct NonFinite {
  std::atomic<int64_t> inputs{0};        // elements of this rank's input, added
  std::atomic<bool> sums_finite{false};  // whether all elements of the result are known to be finite
};

struct Operation {
  OpKind kind = OpKind::kAllReduce;
  kernels::DType type = kernels::DType::kF32;
  kernels::ReduceOp op = kernels::ReduceOp::kSum;
  int root = 0;
  // Elements of this rank's input (kScatter: of the root's).
  int64_t numel = 0;
  // Must lie in this rank's segment if it is larger than kEagerBytes; null where a rank has none (not the root).
  const void* input = nullptr;
  // Any memory; of a large kAllReduce it is the input; of kReduce it may be, and is null but on the root.
  void* output = nullptr;
  // What this rank's input is multiplied by before it is summed (kAllReduce, kReduce); ranks may differ. Anything but 1 for a sum of
  // kF64 or kF32 only.
  double scale = 1.0;
  // For a large kAllReduce of kF32: memory of the segment for numel 16-bit floats of type `wire`, in which the input travels. Sums are
  // formed in kF32; sums that travel on to other hosts are rounded again.
  void* wire_memory = nullptr;
  kernels::DType wire = kernels::DType::kBF16;
  // Of a large kAllReduce, a sum of floats without wire_memory: filled in by the time that wait() returns. Whoever sums looks, while sums
  // are in registers. Nothing is found out about others.
  std::shared_ptr<NonFinite> non_finite = {};
  // kAllToAllSplits: bytes that this rank expects from each, in rank order; empty: nothing from anybody.
  std::vector<int64_t> expected = {};

  int64_t bytes() const { return numel * kernels::item_size(type); }
};

// A block of kAllToAllSplits is a table of size + 1 offsets (int64), padded to this many bytes, then the data: bytes
// [offsets[r], offsets[r + 1]) of it are for rank r.
constexpr int64_t split_table_bytes(int size) { return round_up((size + 1) * 8, 16); }

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

// Thread-safe; operations must be started in the same order everywhere all the same. All methods may throw TransportError, after
// which every other call does.
class Engine {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Engine(EngineConfig config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return config_.rank; }
  int size() const { return static_cast<int>(config_.segments.size()); }

  // Whether the operation's input travels in the slot.
  bool is_eager(const Operation& operation) const;
  struct Moved {
    int64_t bytes = 0;        // of other ranks' memory, that this rank reads or writes
    int64_t outer_numel = 0;  // of its shard, which it sums with the other hosts
  };
  // What an operation like this takes of this rank, if every rank does its own work.
  Moved moved(const Operation& operation) const;
  // Returns its number.
  uint64_t start(const Operation& operation);
  // Does what can be done now, without waiting. Cheap when nothing is under way.
  void progress() {
    if (under_way_.load(std::memory_order_relaxed) != 0) {
      progress_slow();
    }
  }
  // Always throws, and so does every later call here, and soon those of the peers. A handler of a signal that ends a wait with an
  // exception has the same effect, see Note [Signals in a wait].
  [[noreturn]] void give_up(const std::string& reason);
  // From any thread, without waiting for those in here: their calls, and all later ones, throw TransportError(reason); the peers give up
  // as above.
  void interrupt(const std::string& reason);
  bool poll(uint64_t seq);
  // Several threads may wait, and start other operations meanwhile. The time limit is counted from `since`.
  void wait(uint64_t seq, std::chrono::milliseconds timeout, Clock::time_point since = Clock::now());
  // False if the operation is not complete after `longest`; it goes on then. `spin`: somebody waits for the return: look for a while
  // before sleeping, and run the handlers of signals.
  bool wait_for(uint64_t seq, std::chrono::nanoseconds longest, bool spin);

 private:
  // How long to wait, and what to do then.
  struct Patience {
    Clock::time_point until;
    std::chrono::milliseconds limit;  // to be told in the error
    bool fails = true;                // an error, for all ranks; otherwise wait_until returns false
    bool spins = true;
  };
  struct Running {
    Operation operation;
    uint64_t seq = 0;
    bool eager = false;
    std::vector<const std::byte*> wires;  // what they send in the place of their blocks, if has_wire()
    std::vector<double> scales;           // what their inputs are multiplied by
    bool scaled = false;                  // not all by 1
    std::vector<uint8_t> counted;         // who wants to know what is infinite or NaN
    bool counts = false;                  // anybody
    std::vector<std::byte*> blocks;       // every rank's input, once all are known to be there
    int next_shard = 0;                   // of the first shard not yet seen to be complete
  };
  struct Range {
    int64_t begin, end;
  };

  Header& header(int rank) const {
    return *reinterpret_cast<Header*>(config_.segments[static_cast<size_t>(rank)].base);
  }
  Slot& slot(int rank, uint64_t seq) const { return header(rank).slots[seq % kSlots]; }
  std::byte* eager_data(int rank, uint64_t seq) const;
  Running& running(uint64_t seq) { return running_[seq % kSlots]; }
  bool is_push(const Running& op) const { return op.operation.kind == OpKind::kAllReduce && !op.eager; }
  bool has_wire(const Running& op) const { return is_push(op) && op.operation.wire_memory != nullptr; }
  // Whether infinities and NaNs can be told.
  bool can_count(const Running& op) const {
    return is_push(op) && !has_wire(op) && op.operation.op == kernels::ReduceOp::kSum &&
           kernels::is_float(op.operation.type);
  }
  bool is_outer(const Running& op) const { return is_push(op) && config_.outer != nullptr; }
  Range shard(const Operation& operation, int owner) const;
  Moved moved_by_owner(const Operation& operation) const;
  uint64_t chunks(const Running& op, int owner) const;

  void progress_slow();
  bool advance();
  bool advance_outer();
  // Whether this rank reads what `rank` brings; whether `rank` reads what others bring.
  bool needs(const Running& op, int rank) const;
  bool reads(const Running& op, int rank) const;
  bool inputs_here(const Running& op);
  void find_blocks(Running& op);
  void find_splits(Running& op, int rank, const Post& post);
  bool agrees(const Post& post, const Operation& mine) const;
  void pull(Running& op);
  void reduce_to_root(const Running& op) const;
  void sum_ranks(const Running& op, std::span<void* const> targets, std::span<const void* const> sources,
                 int64_t numel) const;
  void reduce_own_shard(Running& op);
  bool reduce_chunk(Running& op, int owner);
  void sum_range(const Running& op, Range range, bool to_all);
  void sum_checked(const Running& op, std::span<void* const> targets, std::span<const void* const> sources,
                   int64_t numel);
  void settle(Running& op);
  void sum_wires(const Running& op, Range range, std::span<void* const> targets) const;
  void push_shard(const Running& op, Range range);
  bool steal(Running& op);
  bool complete(Running& op);
  bool recyclable(uint64_t seq);
  bool blocks(const Running& op, int rank) const;
  void update_under_way();

  std::unique_lock<std::mutex> enter();
  Patience patience(std::chrono::milliseconds timeout, Clock::time_point since) const;
  enum class Goal { kComplete, kRecyclable };
  bool wait_until(Goal goal, Running& op, const Patience& patience, std::unique_lock<std::mutex>& lock);
  uint64_t wait_for_slot(std::unique_lock<std::mutex>& lock);
  void sleep(uint32_t bell, int64_t longest_ns, std::unique_lock<std::mutex>& lock);
  void run_handlers(SignalWatch& signals, const std::string& waited_for, std::unique_lock<std::mutex>& lock);
  void check_peers(Running& waited_for, std::chrono::steady_clock::time_point deadline,
                   std::chrono::milliseconds timeout);
  void check_peer(const Running& op, int rank);
  void check_helper(Running& op, int rank);
  void ring();
  void ensure_usable();
  bool is_broken() const { return !failed_.empty() || interrupted_.load(std::memory_order_acquire); }
  std::string name(int rank) const;
  std::string describe(const Running& op) const;
  std::string details(const Operation& operation) const;
  [[noreturn]] void fail_out_of_step(const Running& op, int rank, const Post& post);
  [[noreturn]] void fail(const std::string& message, int culprit);
  void fail_after(const Running& op, int rank, bool late);
  [[noreturn]] void fail_died(const Running& op, int rank);
  [[noreturn]] void fail_outer(const std::exception& error);

  const EngineConfig config_;
  std::mutex mutex_;
  std::atomic<int> wanting_{0};  // threads that wait for it
  const int forks_;              // of this process when the engine was made: a forked child must not act for the rank
  bool crowded_ = false;         // fewer processors than ranks: spinning would keep a peer from its work
  int short_waits_ = 0;          // so many more waits sleep soon: somebody else needs the processor

  std::array<Running, kSlots> running_;
  uint64_t next_ = 0;             // number of the next operation
  uint64_t cursor_ = 0;           // first whose own work is not done
  uint64_t outer_cursor_ = 0;     // first whose shard is not final
  uint64_t oldest_ = 0;           // first that is not known to be complete
  std::vector<uint64_t> posted_;  // what ranks had posted when last looked at
  std::vector<uint64_t> done_;    // and what they had done
  std::atomic<uint64_t> under_way_{0};
  std::chrono::steady_clock::time_point next_poll_check_;
  std::string failed_;
  int silent_ = -1;  // a peer that gave up without naming a culprit, first seen at silent_since_
  std::chrono::steady_clock::time_point silent_since_;

  std::mutex reason_mutex_;
  std::string reason_;
  std::atomic<bool> interrupted_{false};  // reason_ says why
};

}  // namespace torchddp::shm
