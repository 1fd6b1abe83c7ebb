// Large all-reduces of blocks in the segments.
//
// Note [Chunks]
// Blocks are cut into chunks. On each memory node, one rank owns each chunk. The owner adds the blocks of its node in rank
// order to the sum of the nodes before and leaves the result in its own block. The last node's owner writes the total to all
// blocks of its node, and the other owners copy it from there to all blocks of theirs. So the bits are those of rank order, and
// for N bytes about 2 N cross the link between two nodes, instead of the W N of a host that ignores its nodes. On a single node
// this reduces to: add all blocks and write to all of them while the chunk is in cache. Owners do their chunks one by one. A
// waiting rank with nothing else to do takes chunks of others, first of its own node, so that a rank that is not running holds
// up no one. 16-bit floats are rounded once, at the end. A sum that is passed on would be rounded too, so for them all ranks
// count as one node. Between hosts, owners first write only their own block; the outer link sums it with the other hosts'
// blocks, and then it is written to all blocks of this host.
#pragma once

#include <span>
#include <vector>

#include "shm/grid.h"
#include "shm/inputs.h"
#include "shm/way.h"

namespace torchddp::shm {

class Chunks final : public Way {
 public:
  Chunks(Job& job, Inputs& inputs);

  void begin() override;
  bool work() override;
  bool is_complete() override;
  bool help(bool is_late) override;
  // Not between hosts, where only the owner writes its shard.
  bool has_helpers() const override { return !job_.board.spans(); }
  bool waits_for(int rank, bool is_worked) const override;

  // Between hosts: once work() has returned true, the outer link has this rank's shard. False until it has summed the shard,
  // which is then written to all ranks of this host.
  bool finish_outer();
  bool is_finished() const { return is_finished_; }

 private:
  enum class Step { kSum, kCopy };
  struct Share {
    int begin, end;
    int size() const { return end - begin; }
  };

  size_t node_of(int rank) const { return nodes_.size() == 1 ? 0 : job_.board.groups().node_of(rank); }
  bool is_last(size_t node) const { return node + 1 == nodes_.size(); }
  // What a rank of a node owns, and which rank of a node owns a chunk.
  Share share(int rank) const;
  int owner(size_t node, int chunk) const;
  Stage& stage(int rank, Step step) const;
  std::byte* at(int rank, int chunk) const;
  std::span<void* const> blocks(size_t node, int chunk, std::span<void*> room) const;

  bool do_own(Step step);
  bool do_chunk(int rank, Step step);
  bool is_ready(size_t node, int chunk, Step step);
  bool has_marked(int rank, int chunk, Step step) const;
  bool is_done(int rank) const;
  int64_t bytes_of(int chunk) const { return grid_.range(chunk, chunk + 1).numel() * job_.item(); }
  void count(size_t node, int chunk, int64_t times) const;
  void sum(size_t node, int rank, int chunk) const;
  void copy(size_t node, int chunk) const;
  Range outer_shard() const;

  Job& job_;
  Inputs& inputs_;
  std::span<const Group> nodes_;
  Grid grid_;
  std::vector<int> next_input_;  // by node: the first rank whose input is not known yet
  int next_done_ = 0;            // the first rank not known to have done its share
  bool is_finished_ = false;     // the outer link has summed the shard
};

}  // namespace torchddp::shm
