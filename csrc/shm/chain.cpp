#include "shm/chain.h"

#include <cstring>

namespace torchddp::shm {

Chain::Chain(Job& job, Inputs& inputs, bool crowded)
    : job_(job), inputs_(inputs), crowded_(crowded), next_input_(job.board.groups().small().size()) {}

void Chain::begin() {
  const auto& groups = job_.board.groups().small();
  for (size_t group = 0; group < groups.size(); ++group) {
    next_input_[group] = groups[group].first;
  }
  next_group_ = 0;
  const int leader = job_.board.groups().leader_of(job_.rank());
  source_ = crowded_ || leader == job_.rank() ? job_.board.groups().last_leader() : leader;
  job_.slot(job_.rank()).sums.claimed.store(Tally::pack(job_.seq, 0), std::memory_order_relaxed);
}

bool Chain::work() {
  const auto& groups = job_.board.groups();
  const bool leads = groups.leader_of(job_.rank()) == job_.rank();
  if (crowded_) {
    hand_on_all();
  } else if (leads) {
    hand_on(groups.small_of(job_.rank()));
  }
  const auto& sum = job_.slot(source_).total;
  if (sum.number.load() <= job_.seq) {
    return false;
  }
  const auto bytes = static_cast<size_t>(job_.operation.bytes());
  job_.board.count_lines(source_, parcel_lines(job_.operation.bytes()));
  inputs_.expect(source_, sum.terms);
  if (bytes > 0) {
    std::memcpy(job_.operation.output, sum.data.data(), bytes);
  }
  if (leads && !crowded_ && source_ != job_.rank()) {
    auto& own = job_.slot(job_.rank()).total;
    std::memcpy(own.data.data(), sum.data.data(), bytes);
    own.terms = inputs_.terms();
    own.number.store(job_.seq + 1);
    job_.board.ring();
  }
  return true;
}

// A rank that should have passed a sum on is not running.
bool Chain::help(bool is_late) {
  if (!is_late) {
    return false;
  }
  source_ = job_.board.groups().last_leader();
  return hand_on_all();
}

bool Chain::hand_on_all() {
  bool has_moved = false;
  for (const auto count = next_input_.size(); next_group_ < count; ++next_group_) {
    const int leader = job_.board.groups().small()[next_group_].first;
    if (!inputs_.find(leader)) {  // an error if that rank is in another operation
      break;
    }
    if (hand_on(next_group_)) {
      has_moved = true;
    } else if (Tally::count(job_.slot(leader).sums.claimed.load()) == 0) {
      break;  // not ready
    }
  }
  return has_moved;
}

// Passes the sum of all ranks up to this group to the next one. False if another rank does it, or some input is missing.
bool Chain::hand_on(size_t group) {
  const auto& groups = job_.board.groups().small();
  const int leader = groups[group].first;
  const bool is_last = group + 1 == groups.size();
  auto& slot = job_.slot(leader);
  auto unclaimed = Tally::pack(job_.seq, 0);
  if (!job_.has_posted(leader) || slot.sums.claimed.load() != unclaimed ||
      !inputs_.find(groups[group], next_input_[group])) {
    return false;
  }
  const Sum* before = group == 0 ? nullptr : &job_.slot(groups[group - 1].first).partial;
  if ((before != nullptr && before->number.load() <= job_.seq) ||
      !slot.sums.claimed.compare_exchange_strong(unclaimed, unclaimed + 1)) {
    return false;
  }
  if (before != nullptr) {
    job_.board.count_lines(groups[group - 1].first, parcel_lines(job_.operation.bytes()));
    inputs_.expect(groups[group - 1].first, before->terms);
  }
  auto& sum = is_last ? slot.total : slot.partial;
  void* const target = sum.data.data();
  inputs_.sum(groups[group], before == nullptr ? nullptr : before->data.data(), {0, job_.operation.numel},
              {&target, 1});
  sum.terms = inputs_.terms();
  sum.number.store(job_.seq + 1);
  job_.board.ring();
  return true;
}

}  // namespace torchddp::shm
