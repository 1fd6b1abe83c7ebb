// Vector clocks: what has happened before what.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchddp::sim {

using Actor = size_t;  // 0: the host's threads; then one per stream

struct Moment {
  Actor actor = 0;
  uint32_t time = 0;
};

class Clock {
 public:
  uint32_t operator[](Actor actor) const { return actor < times_.size() ? times_[actor] : 0; }
  bool knows(const Moment& moment) const { return (*this)[moment.actor] >= moment.time; }
  Moment tick(Actor actor) {
    if (times_.size() <= actor) times_.resize(actor + 1);
    return {actor, ++times_[actor]};
  }
  void join(const Clock& other) {
    if (times_.size() < other.times_.size()) times_.resize(other.times_.size());
    for (size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
  }

 private:
  std::vector<uint32_t> times_;
};

}  // namespace torchddp::sim
