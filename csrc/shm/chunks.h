// Large all-reduces of blocks in the segments.
//
// Note [Chunks]
// Blocks are cut into chunks, and each rank owns some. The owner adds the blocks of all ranks in rank order and writes the sum
// to all of them, while the chunk is in cache. Owners do their chunks one by one. A waiting rank with nothing else to do takes
// chunks of others, so that a rank that is not running holds up no one. Between hosts, owners first write only their own block;
// the outer link sums it with the other hosts' blocks, and then it is written to all blocks of this host.
#pragma once

#include "shm/inputs.h"

namespace torchddp::shm {

class Chunks final : public Algorithm {
 public:
  Chunks(Job& job, Inputs& inputs) : job_(job), inputs_(inputs) {}

  void begin() override;
  bool work() override;
  bool is_complete() override;
  bool help() override;
  // Not between hosts, where only the owner writes its shard.
  bool has_helpers() const override { return !job_.board.spans(); }
  bool waits_for(int rank, bool is_worked) const override;

  // Between hosts: once work() has returned true, the outer link has this rank's shard. False until it has summed the shard,
  // which is then written to all ranks of this host.
  bool finish_outer();

 private:
  bool do_chunk(int rank);
  void do_own();
  void sum(int rank, Range range) const;
  bool is_done(int rank) const;
  Range outer_shard() const;

  Job& job_;
  Inputs& inputs_;
  Grid grid_;
  int next_done_ = 0;         // the first rank not known to have done its share
  bool is_finished_ = false;  // the outer link has summed the shard
};

}  // namespace torchddp::shm
