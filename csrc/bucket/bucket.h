// A bucket: flat memory for a group of gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <span>
#include <utility>

#include "bucket/grad_slot.h"
#include "common/check.h"
#include "plan/bucket_plan.h"
#include "transport/transport.h"

namespace torchddp::bucket {

// idle -> filling -> ready -> in_flight -> reduced -> filling ... Any state may become idle, when a step is abandoned.
enum class BucketState : uint8_t {
  kIdle,      // no step in progress
  kFilling,   // waiting for gradients
  kReady,     // all gradients are packed; waiting for its turn (buckets are launched in plan order on every rank)
  kInFlight,  // handed to the transport or to a communication hook
  kSkipped,   // no rank uses its parameters, so it is not reduced in this step
  kReduced,   // results are in flat memory
};

const char* name_of(BucketState state);

// Owned by the Reducer. Several autograd threads may call arrive() concurrently; everything else is called by one thread at a
// time.
class Bucket {
 public:
  // `params`: all parameters of the reducer, indexed by the plan's slots. A bucket owned by another rank has no memory yet.
  // Gradients with offset plan::kInPlace are reduced in place, see Note [Adopted gradients] in grad_slot.h.
  Bucket(const plan::BucketSpec& spec, std::span<const at::Tensor> params, transport::Transport& transport,
         const GradStorage& storage);

  int64_t num_slots() const { return std::ssize(params_); }
  bool is_sparse() const { return sparse_; }
  const GradStorage& grad_storage() const { return grad_storage_; }
  // The only rank that gets the averages, or -1 if all do.
  int owner() const { return owner_; }
  // See Note [Gradients that are given away].
  bool is_given_away() const { return given_away_; }
  // bytes(): flat memory including padding, plus the gradients reduced in place. memory_bytes(): the flat memory alone, if any.
  int64_t bytes() const {
    auto bytes = sparse_ ? 0 : static_cast<int64_t>(flat_.nbytes());
    for (const auto& gradient : in_place_) bytes += static_cast<int64_t>(gradient.nbytes());
    return bytes;
  }
  int64_t memory_bytes() const { return sparse_ || !has_memory() ? 0 : static_cast<int64_t>(flat_.nbytes()); }
  // The parameter index of each slot, in plan order, and its offset in flat memory unless it is reduced in place.
  const std::vector<int64_t>& params() const { return params_; }
  const std::vector<int64_t>& offsets() const { return offsets_; }
  GradSlot& slot(int64_t i) { return slots_[i]; }

  // What the transport and hooks see: 1-d and real (complex memory as pairs). A sparse bucket has none until its gradient is
  // set.
  const at::Tensor& wire() const { return wire_; }
  // The gradients that are reduced in place, each 1-d; without memory between steps.
  const std::vector<at::Tensor>& in_place() const { return in_place_; }
  // At the end of a step: the memory now belongs to whoever holds the gradients.
  void release_in_place() {
    for (auto& slot : slots_) slot.release_if_in_place();
  }
  // The values of slot `i`, 1-d.
  at::Tensor values(int64_t i) const {
    const auto& slot = slots_[i];
    return slot.is_in_place() ? slot.flat() : flat_.narrow(0, offsets_[i], slot.numel());
  }
  // The same memory in the parameters' dtype, or the sparse gradient.
  const at::Tensor& buffer() const { return flat_; }
  // For a sparse gradient that has rows for the ids all ranks agreed on.
  const std::optional<at::Tensor>& row_ids() const { return row_ids_; }
  void set_sparse_gradient(at::Tensor gradient, std::optional<at::Tensor> row_ids) {
    flat_ = wire_ = std::move(gradient);
    row_ids_ = std::move(row_ids);
  }

  // Note [Gradients that are given away]
  // A bucket of another rank's parameters needs flat memory from its first gradient until the owner has read it. It starts
  // without memory, borrows some (take_memory) or adopts a gradient, and releases it after the reduction.
  bool has_memory() const { return !given_away_ || slots_[0].has_memory(); }
  // `memory`: at least bytes() bytes.
  void take_memory(const at::Tensor& memory);
  // Moves to new memory with the same values; ordinary memory on a device, because a single rank may have to move. Views that
  // can't follow stay where they were.
  void move(transport::Transport& transport);
  void release_memory();
  // Zeros the padding between slots, because sums, norms and hooks run over it. Called after anything that may have written
  // there.
  void clear_padding();

  // Changed by one thread at a time; any thread may read it for a report.
  BucketState state() const { return state_.load(std::memory_order_acquire); }
  // InternalError if this is no step from the current state.
  void advance(BucketState to);
  void abandon() noexcept { state_.store(BucketState::kIdle, std::memory_order_release); }

  // Whether the transport can scale the gradient that makes up this whole bucket, and by how much. Otherwise gradients are
  // scaled when they are packed.
  bool scales_in_flight() const { return scales_; }
  // Packing leaves its factor to the reduction, which takes it once, when it starts.
  void leave_scale(double scale) { scale_ = scale; }
  double take_scale() { return std::exchange(scale_, 1.0); }
  bool owes_scale() const { return scale_ != 1.0; }

  // Writes {sum of squares, number of non-finite values} of the bucket to `stats`, two doubles on any device. Both are
  // zero for dtypes that are not floating point and for sparse buckets.
  void measure(const at::Tensor& stats) const;

  // The memory was taken from it: see SlotView::is_displaced.
  bool is_displaced() const {
    const auto first = std::ranges::find_if(slots_, [](const auto& slot) { return slot.has_memory(); });
    return first != slots_.end() && first->is_displaced();
  }
  void begin_step() {
    scale_ = 1.0;
    pending_.store(num_slots(), std::memory_order_relaxed);
    advance(BucketState::kFilling);
  }
  // One more gradient is packed. True for the last one.
  bool arrive() {
    const auto left = pending_.fetch_sub(1, std::memory_order_acq_rel) - 1;
    TDDP_INTERNAL(left >= 0, "the bucket of parameter ", params_.front(), " got more gradients than it has slots");
    return left == 0;
  }

 private:
  void make_wire();
  void find_padding();
  void point_at(const at::Tensor& memory) {
    auto* flat = flat_.unsafeGetTensorImpl();
    flat->set_storage_keep_dtype(memory.storage());
    flat->set_storage_offset(0);
  }

  const GradStorage grad_storage_;
  std::vector<int64_t> params_;
  std::vector<int64_t> offsets_;
  std::vector<GradSlot> slots_;
  at::Tensor flat_;
  at::Tensor wire_;
  std::vector<at::Tensor> in_place_;
  std::vector<at::Tensor> padding_;  // of flat_
  std::optional<at::Tensor> row_ids_;
  std::atomic<BucketState> state_{BucketState::kIdle};
  std::atomic<int64_t> pending_{0};
  double scale_ = 1.0;
  int owner_ = -1;
  bool given_away_ = false;
  bool sparse_ = false;
  bool scales_ = false;
};

}  // namespace torchddp::bucket
