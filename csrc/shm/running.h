// An operation that is under way, and this rank's part of it.
#pragma once

#include <cstdint>
#include <string>

#include "shm/chain.h"
#include "shm/chunks.h"
#include "shm/inputs.h"
#include "shm/job.h"
#include "shm/pull.h"

namespace torchddp::shm {

// From start() until the slot serves another: work() until that is true, then finish_outer() until that is.
class Running {
 public:
  Running(const EngineConfig& config, const Board& board, Failure& failure, Done& done, bool crowded);
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  // Posts this rank's input; its slot must be free.
  void start(const Operation& started, uint64_t number);
  // This rank's own work. False if not all is there that it needs.
  bool work();
  // Between hosts. False until the shard that work() gave to the outer link is summed.
  bool finish_outer();
  // See Way.
  bool help(bool is_late) { return way_->help(is_late); }
  bool has_helpers() const { return way_->has_helpers(); }
  // It is complete, so nobody counts any more. What other hosts add to a sum nobody has looked at.
  void settle();

  uint64_t seq() const { return job_.seq; }
  bool is_all_reduce() const { return job_.operation.kind == OpKind::kAllReduce; }
  bool is_worked() const { return is_worked_; }
  bool is_complete() { return is_worked_ && way_->is_complete(); }
  // Nobody looks at the slot any more.
  bool is_recyclable();
  // Whether this rank's post may be the last that somebody waits for, as far as can be seen.
  bool is_awaited() const;
  // Whether each rank has much to do that no other can do for it.
  bool is_shared_work() const;
  // Whether `rank` is one of those that are still waited for.
  bool waits_for(int rank);
  std::string describe() const { return job_.describe(); }

 private:
  Way& way_for(const Operation& operation);
  void put_input(Post& post) const;
  void expect_another(uint64_t number, int64_t bytes) const;

  Job job_;
  Inputs inputs_;
  Pull pull_;
  Chain chain_;
  Chunks chunks_;
  Way* way_;
  bool is_worked_ = false;    // work() has been done
  bool is_finished_ = false;  // and finish_outer()
  int next_done_ = 0;         // the first rank not yet seen to have let go of the slot
};

}  // namespace torchddp::shm
