// An operation that is under way, and this rank's part of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shm/failure.h"
#include "shm/operation.h"

namespace torchddp::shm {

// From start() until the slot serves another: work() once it has_inputs(), then finish_outer() until that is true.
struct Running {
  explicit Running(const Board& board);

  // Fills in this rank's slot, which must be free: peers look there once it is posted.
  void start(const Operation& started, uint64_t number);
  bool has_inputs();
  // This rank's own work. Between hosts it gives its shard to the outer link then; finish_outer() is false until that has summed it,
  // then hands it to all ranks of this host.
  void work(const EngineConfig& config, Failure& failure);
  bool finish_outer(const EngineConfig& config, Failure& failure);
  // A chunk of a shard whose owner has not got to it: it may be waiting for a processor. Whether there was one.
  bool steal_chunk() const;
  // It is complete, so nobody counts any more. What other hosts add to a sum nobody has looked at.
  void settle();

  bool is_complete();
  // Nobody looks at the slot any more.
  bool is_recyclable();
  // Whether `rank` is one of those that are still waited for.
  bool waits_for(int rank) const;
  // Whether others may help with the sums. Not between hosts, where the owner alone writes its shard.
  bool has_helpers() const { return is_worked && is_push() && !is_outer(); }
  std::string describe() const { return shm::describe(operation, seq); }

  // Whether the owners of shards write to all blocks.
  bool is_push() const { return operation.kind == OpKind::kAllReduce && !eager; }
  bool is_outer() const { return is_push() && board.spans(); }
  bool has_wire() const { return is_push() && operation.wire_memory != nullptr; }
  // Whether infinities and NaNs can be told.
  bool can_count() const;
  // Whether this rank reads what `rank` brings; whether `rank` reads what others bring.
  bool needs(int rank) const;
  bool reads(int rank) const { return operation.kind != OpKind::kReduce || rank == operation.root; }
  // Whether `owner` has nothing left to sum.
  bool is_summed(int owner) const;
  uint64_t chunks(int owner) const;
  // What this rank sums with the other hosts.
  Range outer_shard() const { return is_outer() ? shard(operation, board, board.rank()) : Range{0, 0}; }
  // Addresses of all inputs, from what the peers wrote: checked before use, see Note [Trust].
  void find_inputs(Failure& failure);

  const Board& board;
  Operation operation;
  uint64_t seq = UINT64_MAX;
  bool eager = false;
  bool is_worked = false;               // work() has been done
  bool is_finished = false;             // and finish_outer()
  std::vector<std::byte*> blocks;       // every rank's input, once all are known to be there
  std::vector<const std::byte*> wires;  // what they send in the place of their blocks, if has_wire()
  std::vector<double> scales;           // what their inputs are multiplied by
  bool scaled = false;                  // not all by 1
  std::vector<uint8_t> counted;         // who wants to know what is infinite or NaN
  bool counts = false;                  // anybody
  // The first ranks not yet seen to have brought their input, completed their shard, let go of the slot.
  int next_input = 0, next_shard = 0, next_done = 0;
};

}  // namespace torchddp::shm
