// Large all-reduces of blocks in the segments.
//
// Note [Chunks]
// Blocks are cut into chunks. Of each chunk, one rank of each node of memory is the owner. It adds the blocks of its node in rank order to
// the sum of the nodes before, and leaves that in its own block; the last node's owner writes the total to all blocks of its node, and
// the other owners copy it from there into all blocks of theirs. So the bits are those of rank order, and of N bytes about 2 N cross
// the link between two nodes, in place of the W N of a host that does not know its nodes. On one node all that is left is: add the
// blocks of all, write to all, while the chunk is in cache.
// Owners take their chunks one by one. Who waits with nothing else to do takes chunks of others, of its own node's first, so that a rank
// that is not running holds nobody up.
// 16-bit floats are rounded once, at the end: what is handed on would be rounded too, so for them all ranks are one node.
// Between hosts the owners write only their own block at first; the outer link sums it with the other hosts', and then it is written to
// all blocks of this host.
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
  // Not between hosts, where the owner alone writes its shard.
  bool has_helpers() const override { return !job_.board.spans(); }
  bool waits_for(int rank, bool is_worked) const override;

  // Between hosts: when work() was true, this rank's shard is with the outer link. False until that has summed it; then it is handed to
  // all ranks of this host.
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
  // What a rank of a node owns; and who of a node owns a chunk.
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
  int next_done_ = 0;            // the first rank that is not known to have done its share
  bool is_finished_ = false;     // the outer link has summed the shard
};

}  // namespace torchddp::shm
