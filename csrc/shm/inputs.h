// What the ranks have posted for an operation.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shm/groups.h"
#include "shm/job.h"

namespace torchddp::shm {

// Checked before it is used, see Note [Trust]. What disagrees with this rank's operation is an error.
class Inputs {
 public:
  explicit Inputs(Job& job);

  void begin();
  // What this rank is in; an error if `theirs`, which `rank` has written, are others.
  Terms terms() const;
  void expect(int rank, const Terms& theirs) const;
  // No more are looked for: this rank's work is done, and slots may come to serve later operations.
  void close() { is_open_ = false; }
  // False as long as a rank has not posted its own.
  bool find(int rank);
  // Whether those of all these ranks are known. `next`: the first not yet known to be, kept by the caller.
  bool find(Group ranks, int& next);

  // Of ranks whose inputs are known. Of a Form::kQuestion: whether they accept.
  bool all_accept() const { return all_accept_; }
  std::byte* block(int rank) const { return blocks_[static_cast<size_t>(rank)]; }
  // In rank order, `range` of the inputs of these ranks after `partial`, which may be null. To all targets.
  void sum(Group ranks, const void* partial, Range range, std::span<void* const> targets) const;

 private:
  void check(int rank);
  std::byte* find_block(int rank) const;
  std::byte* find_split(int rank, const Terms& terms) const;
  void sum_checked(Group ranks, bool has_partial, std::span<void* const> targets, std::span<const void* const> sources,
                   std::span<const double> scales, int64_t numel) const;
  void sum_wires(Group ranks, const void* partial, Range range, std::span<void* const> targets) const;

  Job& job_;
  std::vector<uint8_t> known_;           // by rank
  std::vector<std::byte*> blocks_;       // every rank's input
  std::vector<const std::byte*> wires_;  // what they send in the place of their blocks
  std::vector<double> scales_;           // what their inputs are multiplied by
  std::vector<uint8_t> counted_;         // who wants to know what is infinite or NaN
  bool scaled_ = false;                  // not all by 1
  bool counts_ = false;                  // anybody
  bool all_accept_ = true;
  bool is_open_ = true;
};

}  // namespace torchddp::shm
