#include "reducer/divisor.h"

#include "common/check.h"
#include "transport/c10d/group_work.h"

namespace torchddp::reducer {

void Divisor::set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool use_static_world_size) {
  forward_work_ = std::move(work);
  use_static_world_size_ = use_static_world_size;
}

int64_t Divisor::ranks() const {
  const int64_t ranks = divisor_ ? divisor_() : context_.transport->size();
  TDDP_CHECK(ranks > 0, "gradients can't be averaged over ", ranks, " ranks");
  return ranks;
}

double Divisor::of_hooks() const { return hook_ ? static_cast<double>(ranks()) : 1.0; }

int64_t Divisor::get() const {
  const auto divisor = ranks();
  if (forward_work_ == nullptr || use_static_world_size_) {
    return divisor;
  }
  const WaitScope waits(events_.live(), "how many ranks still have inputs (join)");
  if (transport::is_gloo(*context_.group)) {
    transport::wait_interruptibly(*forward_work_, context_.group, context_.transport->interruption());
  } else {
    forward_work_->wait();
  }
  const auto results = forward_work_->result();
  TDDP_INTERNAL(!results.empty(), "the all-reduce of join() has no result");
  return results.front().item<int64_t>();
}

}  // namespace torchddp::reducer
