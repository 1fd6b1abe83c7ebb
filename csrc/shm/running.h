// An operation in flight, and this rank's part of it.
#pragma once

#include <cstdint>
#include <string>

#include "shm/chunks.h"
#include "shm/pull.h"

namespace torchddp::shm {

// From start() until the slot is reused: call work() until it returns true, then finish_outer() until that does.
class Running {
 public:
  Running(const EngineConfig& config, const Board& board, Failure& failure, Done& done);
  Running& operator=(Running&&) = delete;

  // Posts this rank's input; its slot must be free.
  void start(const Operation& started, uint64_t number);
  // Does this rank's own work. False if some input is still missing.
  bool work();
  // Between hosts. False until the shard that work() passed to the outer link is summed.
  bool finish_outer();
  // See Algorithm.
  bool help() { return algorithm_->help(); }
  bool has_helpers() const { return algorithm_->has_helpers(); }
  // It is complete, so no rank adds to the counts any more. Values that other hosts add to a sum are not checked.
  void settle();

  uint64_t seq() const { return job_.seq; }
  bool is_all_reduce() const { return job_.operation.kind == OpKind::kAllReduce; }
  bool is_worked() const { return is_worked_; }
  bool is_complete() { return is_worked_ && algorithm_->is_complete(); }
  // No rank looks at the slot any more.
  bool is_recyclable();
  // Whether this rank's post may be the last one that some rank waits for, as far as can be seen.
  bool is_awaited() const;
  // Whether each rank has much work that no other rank can do.
  bool is_shared_work() const;
  // Whether `rank` is still being waited for.
  bool waits_for(int rank);
  std::string describe() const { return job_.describe(); }

 private:
  void put_input(Post& post) const;
  void expect_another(uint64_t number, int64_t bytes) const;

  Job job_;
  Inputs inputs_;
  Pull pull_;
  Chunks chunks_;
  Algorithm* algorithm_;
  bool is_worked_ = false;    // work() has returned true
  bool is_finished_ = false;  // and so has finish_outer()
  int next_done_ = 0;         // the first rank not yet seen to have released the slot
};

}  // namespace torchddp::shm
