// How an operation is done: a class for each way, of which Running chooses one. All calls are made by one thread at a time.
#pragma once

namespace torchddp::shm {

class Way {
 public:
  virtual ~Way() = default;
  // Before this rank posts.
  virtual void begin() = 0;
  // Does what can be done now of this rank's own work. True once that is all done, and no peer's input is read here any more.
  virtual bool work() = 0;
  // When that was true: whether the result is there, and nobody needs this rank's memory any more.
  virtual bool is_complete() = 0;
  // Does some of what another rank has not got to; it may be waiting for a processor. Whether there was something. `is_late`: this rank
  // has waited for long.
  virtual bool help(bool /*is_late*/) { return false; }
  // Whether others may have parts of the operation in their hands that they did not bring.
  virtual bool has_helpers() const { return false; }
  // Whether `rank` is one of those that are still waited for. `is_worked`: work() was true.
  virtual bool waits_for(int rank, bool is_worked) const = 0;
};

}  // namespace torchddp::shm
