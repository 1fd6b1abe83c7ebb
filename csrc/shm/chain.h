// Small all-reduces of many ranks.
//
// Note [Chains]
// Were every rank to read what every other one has posted, a host would move W (W - 1) cache lines an operation, and W - 1 of them to each
// rank one after the other. So one rank in a group of a few reads what the group has posted, adds it in rank order to the sum of the
// groups before, and hands that on to the next group's. The last one has the total; those who lead groups read it there, the others
// from their leader: 2 (W - 1) lines, and no rank reads more than a group and a few.
// Nothing is waited for twice: a leader reads its group while the groups before do the same. Where ranks outnumber processors, most of
// them are not running, and it is whoever comes last who does it all: no rank needs to run again before it takes the total.
// The same idea is in xhc of Open MPI (hierarchies, data in the line of the flag) and in Jocksch et al., IJHPCA 2025 (radices).
#pragma once

#include "shm/inputs.h"
#include "shm/way.h"

namespace torchddp::shm {

class Chain final : public Way {
 public:
  Chain(Job& job, Inputs& inputs, bool crowded);

  void begin() override;
  bool work() override;
  bool is_complete() override { return true; }
  bool help(bool is_late) override;
  bool has_helpers() const override { return true; }
  bool waits_for(int rank, bool is_worked) const override { return !is_worked && !job_.has_posted(rank); }

 private:
  bool hand_on(size_t group);
  bool hand_on_all();

  Job& job_;
  Inputs& inputs_;
  const bool crowded_;
  int source_ = 0;               // where this rank takes the total
  std::vector<int> next_input_;  // by group: the first rank not yet seen to have posted
  size_t next_group_ = 0;        // the first whose sum this rank has not seen handed on
};

}  // namespace torchddp::shm
