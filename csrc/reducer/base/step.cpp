#include "reducer/base/step.h"

#include <utility>

namespace torchddp::reducer {

Step::Step(size_t num_params) : marks_(num_params), order_(num_params) {}

void Step::clear() {
  for (auto& mark : marks_) {
    mark.store(Mark::kNone, std::memory_order_relaxed);
  }
  num_ready_.store(0, std::memory_order_relaxed);
  take_late();
  begun_.store(false, std::memory_order_relaxed);
  begin_failed_ = false;
  incomplete_.store(false, std::memory_order_relaxed);
}

std::vector<int64_t> Step::unmarked() const {
  std::vector<int64_t> result;
  for (size_t i = 0; i < marks_.size(); ++i) {
    if (marks_[i].load(std::memory_order_relaxed) == Mark::kNone) {
      result.push_back(static_cast<int64_t>(i));
    }
  }
  return result;
}

std::vector<int64_t> Step::ready_order() const {
  return {order_.begin(), order_.begin() + num_ready_.load(std::memory_order_relaxed)};
}

void Step::add_late(int64_t param, at::Tensor saved) {
  const std::lock_guard lock(late_mutex_);
  late_.push_back({param, std::move(saved)});
}

std::vector<LateGrad> Step::take_late() {
  const std::lock_guard lock(late_mutex_);
  return std::exchange(late_, {});
}

}  // namespace torchddp::reducer
