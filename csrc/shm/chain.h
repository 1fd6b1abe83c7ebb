// Small all-reduces of many ranks.
//
// Note [Chains]
// If every rank read every other rank's post, an operation would move W (W - 1) cache lines on a host, W - 1 of them to each
// rank one after the other. Instead, one rank in each small group reads the group's posts, adds them in rank order to the sum
// of the groups before, and passes that on to the next group. The last one has the total. Group leaders read it there and the
// others from their leader: 2 (W - 1) lines, and no rank reads much more than a group. No time is spent waiting twice: a leader
// reads its group while the groups before do the same. If ranks outnumber processors, most of them are not running, and the
// last to arrive does all the work, so that no rank needs to run again before it takes the total. xhc of Open MPI (hierarchies,
// data in the flag's line) and Jocksch et al., IJHPCA 2025 (radices) use the same idea.
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
  int source_ = 0;               // where this rank gets the total
  std::vector<int> next_input_;  // by group: the first rank not yet seen to have posted
  size_t next_group_ = 0;        // the first whose sum this rank has not seen passed on
};

}  // namespace torchddp::shm
