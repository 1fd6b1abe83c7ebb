// What the ranks have posted for an operation.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shm/job.h"

namespace torchddp::shm {

// Checked before use, see Note [Trust]. Anything that disagrees with this rank's operation is an error.
class Inputs {
 public:
  explicit Inputs(Job& job);

  void begin();
  // Of this rank's operation.
  Terms terms() const;
  // Stops looking for inputs: this rank's work is done, and slots may be reused by later operations.
  void close() { is_open_ = false; }
  // False as long as the rank has not posted its input.
  bool find(int rank);
  // False as long as any rank has not.
  bool find_all();

  // For ranks whose inputs are known. For Form::kQuestion: whether they accept.
  bool all_accept() const { return all_accept_; }
  std::byte* block(int rank) const { return blocks_[rank]; }
  // Adds `range` of all ranks' inputs in rank order. Writes to all targets.
  void sum(Range range, std::span<void* const> targets) const;

 private:
  void check(int rank);
  std::byte* find_block(int rank) const;

  Job& job_;
  std::vector<uint8_t> known_;      // by rank
  std::vector<std::byte*> blocks_;  // every rank's input
  std::vector<double> scales_;      // what their inputs are multiplied by
  std::vector<uint8_t> counted_;    // who asks for non-finite counts
  bool scaled_ = false;             // not all scales are 1
  bool counts_ = false;             // whether any rank does
  bool all_accept_ = true;
  bool is_open_ = true;
  int next_ = 0;  // the first rank not known yet, for find_all()
};

}  // namespace torchddp::shm
