// Each rank reads what it needs of the others' inputs. Complete when no peer reads this rank's input any more; at once if that
// was in the post.
#pragma once

#include "shm/inputs.h"

namespace torchddp::shm {

class Pull final : public Algorithm {
 public:
  Pull(Job& job, Inputs& inputs) : job_(job), inputs_(inputs) {}

  void begin() override { next_input_ = next_done_ = 0; }
  bool work() override;
  bool is_complete() override;
  bool waits_for(int rank, bool is_worked) const override;

 private:
  // Whether this rank reads the input of `rank`, and whether `rank` reads the inputs of others.
  bool needs(int rank) const;
  bool reads(int rank) const { return job_.operation.kind != OpKind::kReduce || rank == job_.operation.root; }
  void move();
  template <class Read>
  void read_in_parts(Read&& read);
  void receive();
  void sum_whole();

  Job& job_;
  Inputs& inputs_;
  int next_input_ = 0, next_done_ = 0;  // the first ranks not yet seen to have posted, and to have finished
};

}  // namespace torchddp::shm
