#include "shm/groups.h"

#include <set>

#include "common/round_up.h"

namespace torchddp::shm {
namespace {

// The number of cores that share a last-level cache on many processors. A leader reads this many posts, and a sum passes that
// many fewer leaders.
constexpr int kSmall = 8;

std::vector<Group> runs_of(std::span<const int> nodes) {
  std::vector<Group> runs;
  for (int rank = 0; rank < std::ssize(nodes); ++rank) {
    const auto at = static_cast<size_t>(rank);
    if (rank == 0 || nodes[at] != nodes[at - 1]) {
      runs.push_back({rank, 0});
    }
    ++runs.back().size;
  }
  const std::set<int> different(nodes.begin(), nodes.end());
  if (different.size() < runs.size()) {
    return {{0, static_cast<int>(nodes.size())}};
  }
  return runs;
}

std::vector<size_t> places(const std::vector<Group>& groups) {
  std::vector<size_t> place;
  for (size_t group = 0; group < groups.size(); ++group) {
    place.insert(place.end(), static_cast<size_t>(groups[group].size), group);
  }
  return place;
}

}  // namespace

Groups::Groups(std::span<const int> nodes) : all_{{0, static_cast<int>(nodes.size())}}, nodes_(runs_of(nodes)) {
  for (const auto& node : nodes_) {
    const auto parts = static_cast<int>(ceil_div(node.size, kSmall));
    for (int part = 0; part < parts; ++part) {
      const int first = node.first + node.size * part / parts;
      small_.push_back({first, node.first + node.size * (part + 1) / parts - first});
    }
  }
  node_of_ = places(nodes_);
  small_of_ = places(small_);
}

}  // namespace torchddp::shm
