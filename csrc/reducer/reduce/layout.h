// The buckets: which there are, where each gradient goes, and how each bucket is reduced.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "bucket/bucket.h"
#include "plan/bucket_plan.h"
#include "reducer/base/context.h"
#include "reducer/base/grad_marks.h"
#include "reducer/base/step.h"
#include "reducer/reduce/reductions.h"
#include "reducer/report/status.h"

namespace torchddp::reducer {

// Changes only between steps.
class BucketLayout {
 public:
  struct Place {                       // where a parameter's gradient goes
    bucket::GradSlot* slot = nullptr;  // null for a sparse one
    bucket::Bucket* bucket = nullptr;
    int64_t index = 0;
  };

  BucketLayout(const Context& context, const Reductions& reductions, GradMarks& marks)
      : context_(context), reductions_(reductions), marks_(marks) {}

  // Creates new buckets. Gradients that live in the old ones move.
  void lay_out(plan::BucketPlan plan);
  // Recreates the same buckets, in the memory of the current transport.
  void lay_out_again() { lay_out(plan_); }
  // Called when a communication hook now reduces all buckets, or another reducer averages the same gradients.
  void adapt() {
    if (in_place_bytes_ == reductions_.in_place_bytes()) {
      choose_reductions();
    } else {
      lay_out_again();
    }
  }

  // Gradients that live in buckets get memory of their own.
  void give_up_views() const;

  // Releases all buckets. Gradients that are views keep their memory.
  void clear() {
    const std::lock_guard lock(layout_mutex_);
    if (context_.main_grads != nullptr) context_.main_grads->leave_slots();
    places_.clear();
    of_buckets_.clear();
    buckets_.clear();
  }

  // A failed operation may still write to the buckets, so the next step gets new ones.
  void retire() { retired_ = true; }
  void begin_step();
  void end_step() {
    for (const auto& bucket : buckets_) bucket->release_in_place();
  }
  // Forgets reductions in flight.
  void abandon() noexcept {
    for (const auto& reduction : of_buckets_) reduction->abandon();
    for (const auto& bucket : buckets_) bucket->abandon();
  }

  const plan::BucketPlan& plan() const { return plan_; }
  int64_t size() const { return std::ssize(buckets_); }
  bucket::Bucket& bucket(int64_t index) const { return *buckets_[index]; }
  Reduction& reduction(int64_t index) const { return *of_buckets_[index]; }
  // Whether gradients are views of the bucket. If not, averages are copied back.
  bool gives_views(const bucket::Bucket& bucket) const { return context_.views && bucket.grad_storage().views; }
  // Whether the slot's view replaces a gradient that is not in its slot. If not, the average is copied back.
  bool becomes_view(const bucket::Bucket& bucket, const at::Tensor& grad) const {
    return gives_views(bucket) && context_.rpc == nullptr &&
           (!grad.defined() ||
            (!grad.requires_grad() && (!context_.has_own_storage() || bucket::is_unshared(grad, nullptr))));
  }
  const Place& place(int64_t param) const { return places_[param]; }

  // Gives a bucket memory if it has none: see Note [Gradients that are given away] in bucket/bucket.h. Thread-safe.
  void lend_memory(bucket::Bucket& bucket) {
    const std::lock_guard lock(lend_mutex_);
    if (!bucket.has_memory()) {
      bucket.take_memory(context_.transport->scratch().lend(bucket.bytes(), bucket.buffer().device()));
    }
  }

  // One row per bucket, see bucket::Bucket::measure; float64, on the parameters' device. Undefined unless configured.
  const at::Tensor& gradient_stats() const { return gradient_stats_; }
  void measure(int64_t index) const {
    if (gradient_stats_.defined()) bucket(index).measure(gradient_stats_[index]);
  }

  int64_t memory_bytes() const {
    int64_t bytes = context_.owned ? context_.transport->scratch().bytes() : 0;
    for (const auto& bucket : buckets_) bytes += bucket->memory_bytes();
    return bytes;
  }
  // Adds the buckets to a report, unless they are being replaced: a reporting thread must not wait for one that allocates.
  void describe(Status& status, const Step& step) const;

 private:
  std::vector<bool> find_views() const;
  void add_bucket(const plan::BucketSpec& spec, const std::vector<bool>& is_view);
  void move_grad(int64_t param, bucket::GradSlot* slot, bool is_view) const;
  void choose_reductions() {
    of_buckets_.clear();
    for (int64_t i = 0; i < size(); ++i) of_buckets_.push_back(reductions_.make(bucket(i), i, size()));
  }
  void expect_gradients() const;

  const Context& context_;
  const Reductions& reductions_;
  GradMarks& marks_;
  plan::BucketPlan plan_;
  std::vector<std::unique_ptr<bucket::Bucket>> buckets_;
  std::vector<ReductionPtr> of_buckets_;  // by bucket
  std::vector<Place> places_;             // by parameter
  at::Tensor gradient_stats_;
  int64_t in_place_bytes_ = 0;  // see Bucket
  bool retired_ = false;
  mutable std::mutex layout_mutex_;  // guards buckets_; a step whose buckets stay never takes it
  std::mutex lend_mutex_;
};

}  // namespace torchddp::reducer
