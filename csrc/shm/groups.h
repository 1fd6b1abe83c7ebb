// Which ranks of a host work together: those of one memory node, in small groups.
#pragma once

#include <span>
#include <vector>

namespace torchddp::shm {

// Consecutive ranks.
struct Group {
  int first = 0;
  int size = 0;
  int end() const { return first + size; }
};

// Sums are formed in rank order and one group passes its partial sum to the next, so a group is a run of consecutive ranks. If
// the ranks of two nodes alternate, nodes don't help, and all ranks count as one node.
class Groups {
 public:
  // `nodes`: where each rank runs.
  explicit Groups(std::span<const int> nodes);

  // All ranks, as if they were on one node.
  const std::vector<Group>& all() const { return all_; }
  // All ranks of one node each.
  const std::vector<Group>& nodes() const { return nodes_; }
  size_t node_of(int rank) const { return node_of_[static_cast<size_t>(rank)]; }
  // Parts of nodes, with few enough ranks for one of them to read every rank's post.
  const std::vector<Group>& small() const { return small_; }
  size_t small_of(int rank) const { return small_of_[static_cast<size_t>(rank)]; }
  int leader_of(int rank) const { return small_[small_of(rank)].first; }
  // The leader that has the total.
  int last_leader() const { return small_.back().first; }

 private:
  std::vector<Group> all_, nodes_, small_;
  std::vector<size_t> node_of_, small_of_;
};

}  // namespace torchddp::shm
