// The current step: whether hooks reduce, which gradients have arrived, and in which order.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace torchddp::reducer {

enum class Mark : uint8_t { kNone, kUsed, kUnused };

// A gradient that needs attention at the end of the step.
struct LateGrad {
  int64_t param;
  at::Tensor saved;  // restored if nobody used the parameter
};

// Hooks on several autograd threads call it concurrently. Only a parameter's own hook touches its mark and its place in the
// order; the rest is atomic or locked. The outcome of a step stays readable until the next one begins (clear).
class Step {
 public:
  explicit Step(size_t num_params) : marks_(num_params), order_(num_params) {}

  void clear() {
    for (auto& mark : marks_) mark.store(Mark::kNone, std::memory_order_relaxed);
    num_ready_.store(0, std::memory_order_relaxed);
    take_late();
    begun_.store(false, std::memory_order_relaxed);
    begin_failed_ = false;
    incomplete_.store(false, std::memory_order_relaxed);
  }
  // From here on, hooks reduce.
  void arm() { armed_.store(true, std::memory_order_release); }
  void disarm() { armed_.store(false, std::memory_order_release); }
  // All gradients are final, or the step was abandoned and no one needs to be told what is missing.
  void end() { incomplete_.store(false, std::memory_order_release); }

  bool armed() const { return armed_.load(std::memory_order_acquire); }
  // The first hook of this backward has run.
  bool begun() const { return begun_.load(std::memory_order_acquire); }
  // Some gradients have arrived, but not all.
  bool is_unfinished() const { return incomplete_.load(std::memory_order_acquire) && armed(); }
  bool is_under_way() const { return armed() || incomplete_.load(std::memory_order_acquire); }

  // Runs `body` in the first hook to arrive; the others wait for it. False if it has thrown, which ends the step.
  template <typename Body>
  bool begin(Body&& body) {
    const std::lock_guard lock(begin_mutex_);
    if (begin_failed_) return false;
    if (!begun_.load(std::memory_order_relaxed)) {
      begin_failed_ = true;
      body();
      begin_failed_ = false;
      begun_.store(true, std::memory_order_release);
    }
    return true;
  }

  // Returns the previous mark.
  Mark mark(int64_t param, Mark mark) {
    incomplete_.store(true, std::memory_order_relaxed);
    return marks_[param].exchange(mark, std::memory_order_relaxed);
  }
  Mark mark_of(int64_t param) const { return marks_[param].load(std::memory_order_relaxed); }
  std::vector<int64_t> unmarked() const {
    std::vector<int64_t> result;
    for (int64_t param = 0; param < std::ssize(marks_); ++param) {
      if (mark_of(param) == Mark::kNone) result.push_back(param);
    }
    return result;
  }

  void add_to_order(int64_t param) { order_[num_ready_.fetch_add(1, std::memory_order_relaxed)] = param; }
  std::vector<int64_t> ready_order() const {
    return {order_.begin(), order_.begin() + num_ready_.load(std::memory_order_relaxed)};
  }

  void add_late(int64_t param, at::Tensor saved = {}) {
    const std::lock_guard lock(late_mutex_);
    late_.push_back({param, std::move(saved)});
  }
  std::vector<LateGrad> take_late() {
    const std::lock_guard lock(late_mutex_);
    return std::exchange(late_, {});
  }

  // The factor that gradients are multiplied by.
  double scale() const { return scale_; }
  void set_scale(double scale) { scale_ = scale; }

 private:
  std::atomic<bool> armed_{false};
  std::atomic<bool> begun_{false};
  std::atomic<bool> incomplete_{false};
  std::mutex begin_mutex_;
  bool begin_failed_ = false;
  std::vector<std::atomic<Mark>> marks_;
  std::vector<int64_t> order_;
  std::atomic<int64_t> num_ready_{0};
  std::mutex late_mutex_;
  std::vector<LateGrad> late_;
  double scale_ = 1.0;
};

}  // namespace torchddp::reducer
