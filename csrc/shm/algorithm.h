// How an operation is done: one class per algorithm; Running chooses. Called by one thread at a time.
#pragma once

namespace torchddp::shm {

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
