// A bucket: flat memory for some gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <optional>
#include <span>

#include "bucket/grad_slot.h"
#include "plan/bucket_plan.h"
#include "transport/transport.h"

namespace torchddp::bucket {

// idle -> filling -> ready -> in_flight -> reduced -> filling ...
enum class BucketState : uint8_t {
  kIdle,      // no step under way
  kFilling,   // waits for gradients
  kReady,     // all gradients are packed; waits for its turn (buckets are launched in plan order on every rank)
  kInFlight,  // handed to the transport or to a communication hook
  kSkipped,   // nobody uses its parameters: not reduced in this step
  kReduced,   // results are in flat memory
};

// Owned by the Reducer. arrive() may be called by several autograd threads at once; everything else by one thread at a time.
class Bucket {
 public:
  // `params`: all parameters of the reducer, indexed by the plan's slots. A bucket that belongs to another rank has no memory yet.
  // Gradients with the offset plan::kApart lie apart, see Note [Adopted gradients] in grad_slot.h.
  Bucket(const plan::BucketSpec& spec, std::span<const at::Tensor> params, transport::Transport& transport,
         const Keeping& keeping);

  int64_t num_slots() const { return static_cast<int64_t>(params_.size()); }
  bool is_sparse() const { return sparse_; }
  const Keeping& keeping() const { return keeping_; }
  // The rank that alone gets the averages, or -1.
  int owner() const { return owner_; }
  // See Note [Gradients that are given away].
  bool is_given_away() const { return given_away_; }
  // Of the flat memory, padding included, and of the gradients that lie apart; and of the flat memory alone, if it is there.
  int64_t bytes() const;
  int64_t memory_bytes() const;
  // Parameter index of each slot, in the plan's order, and where it begins in flat memory, unless it lies apart.
  const std::vector<int64_t>& params() const { return params_; }
  const std::vector<int64_t>& offsets() const { return offsets_; }
  GradSlot& slot(int64_t i) { return slots_[static_cast<size_t>(i)]; }

  // What the wire and hooks see: 1-d, real (complex memory as pairs). A sparse bucket has none until a gradient was set.
  const at::Tensor& wire() const { return wire_; }
  // The gradients that lie apart, 1-d each; without memory between steps.
  const std::vector<at::Tensor>& apart() const { return apart_; }
  // At the end of a step: whoever has the gradients has their memory.
  void release_apart();
  // The values of slot `i`, 1-d.
  at::Tensor values(int64_t i) const;
  // The same memory in the parameters' dtype, or the sparse gradient.
  const at::Tensor& buffer() const { return flat_; }
  // Of a sparse gradient that has rows for what all ranks have agreed on.
  const std::optional<at::Tensor>& row_ids() const { return row_ids_; }
  void set_sparse_gradient(at::Tensor gradient, std::optional<at::Tensor> row_ids) {
    flat_ = wire_ = std::move(gradient);
    row_ids_ = std::move(row_ids);
  }

  // Note [Gradients that are given away]
  // A bucket of another rank's parameters needs flat memory from its first gradient until the owner has read it. It has none when
  // it is made, borrows some (take_memory) or adopts a gradient, and lets go of it after the reduction.
  bool has_memory() const { return !given_away_ || slots_[0].has_memory(); }
  // `memory`: bytes, at least bytes() of them.
  void take_memory(const at::Tensor& memory);
  // Other memory with the same values; plain on a device, for one rank alone may have to move. Returns the parameters whose views stay
  // where they were.
  std::vector<int64_t> move(transport::Transport& transport);
  void release_memory();
  // Zeros what lies between slots: no gradients, but sums, norms and hooks go over it. Whoever else writes there calls this.
  void clear_padding();

  // One thread at a time writes it, any thread may read it for a report.
  std::atomic<BucketState> state{BucketState::kIdle};

  // Whether the transport can scale a gradient that is all of this bucket, and what it shall scale it by. Otherwise gradients
  // are scaled when they are packed.
  bool scales_in_flight() const { return scales_; }
  double scale = 1.0;

  // Of all values as they are: {sum of squares, number of those that are not finite} into `stats`, two doubles on the bucket's
  // device. Memory of a dtype that is not floating point gives zeros, as does a sparse bucket.
  void measure(const at::Tensor& stats) const;

  void begin_step() {
    scale = 1.0;
    pending_.store(num_slots(), std::memory_order_relaxed);
    state = BucketState::kFilling;
  }
  // One more gradient is packed. True for the last.
  bool arrive() { return pending_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

 private:
  void make_wire();
  void find_padding();
  void point_at(const at::Tensor& memory);

  const Keeping keeping_;
  std::vector<int64_t> params_;
  std::vector<int64_t> offsets_;
  std::vector<GradSlot> slots_;
  at::Tensor flat_;
  at::Tensor wire_;
  std::vector<at::Tensor> apart_;
  std::vector<at::Tensor> padding_;  // of flat_
  std::optional<at::Tensor> row_ids_;
  std::atomic<int64_t> pending_{0};
  int owner_ = -1;
  bool given_away_ = false;
  bool sparse_ = false;
  bool scales_ = false;
};

}  // namespace torchddp::bucket
