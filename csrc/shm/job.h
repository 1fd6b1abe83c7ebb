// An operation that this rank has started: where it is to be done, and how.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shm/failure.h"
#include "shm/operation.h"

namespace torchddp::shm {

// How far each rank's own work has progressed. Only looked up again where it matters, usually once in kSlots operations.
class Done {
 public:
  explicit Done(const Board& board) : board_(board), seen_(static_cast<size_t>(board.size())) {}

  // Whether a rank has done its own work in an operation.
  bool has(int rank, uint64_t seq) {
    auto& seen = seen_[rank];
    if (seen <= seq) seen = board_.header(rank).done.load();
    return seen > seq;
  }

 private:
  const Board& board_;
  std::vector<uint64_t> seen_;
};

struct Job {
  const EngineConfig& config;
  const Board& board;
  Failure& failure;
  Done& done;
  Operation operation = {};
  uint64_t seq = UINT64_MAX;

  int rank() const { return board.rank(); }
  Slot& slot(int of) const { return board.slot(of, seq); }
  bool has_posted(int of) const { return board.has_posted(of, seq); }
  int64_t item() const { return kernels::item_size(operation.type); }
  std::string describe() const { return shm::describe(operation, seq); }
};

// How an operation is done: one class per algorithm; Running chooses. Called by one thread at a time.
class Algorithm {
 public:
  virtual ~Algorithm() = default;
  // Called before this rank posts.
  virtual void begin() = 0;
  // Does as much of this rank's own work as possible. True once it is all done and no peer's input is needed here any more.
  virtual bool work() = 0;
  // After work() returned true: whether the result is ready and no rank needs this rank's memory any more.
  virtual bool is_complete() = 0;
  // Does some work of a rank that has not got to it, perhaps because it is waiting for a processor. True if there was any.
  virtual bool help() { return false; }
  // Whether other ranks may be working on parts of the operation that are not their own.
  virtual bool has_helpers() const { return false; }
  // Whether `rank` is still being waited for. `is_worked`: work() has returned true.
  virtual bool waits_for(int rank, bool is_worked) const = 0;
};

}  // namespace torchddp::shm
