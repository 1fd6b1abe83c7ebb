// Rules for a gradient on its way into a bucket, however it is packed, and what becomes of it until the step ends.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "reducer/base/context.h"
#include "reducer/base/step.h"
#include "reducer/reduce/layout.h"
#include "reducer/report/non_finite.h"

namespace torchddp::reducer {

// Note [Gradients during backward]
// As with torch's class, a gradient stays this rank's own until the end of backward, where the average replaces it: hooks that
// run in between see it, and after a backward that raises it is what autograd computed. What is written to it after it was
// packed is lost, as with torch's class, but not silently: version counters tell, compared when averages are handed back. Only
// if gradients are the very memory that a communication hook gets, it may write to them.
//
// Two kinds of gradients are reduced in the program's own memory, to save copies: those whose memory a bucket adopts, and those
// that autograd accumulated in their slot. They become averages, or partial sums, earlier. So they are copied as well
// (`shows_own`) if there is a communication hook, or a hook of a parameter or module when backward begins. A hook on another
// tensor and a function's own backward can't be seen: they read such a gradient at their own risk, and a write is an error.
class PackedGrads {
 public:
  explicit PackedGrads(const Context& context) : context_(context), packed_(context.params.size()) {}

  // `has_hooks`: of modules; then of parameters, or for communication.
  void begin_step(bool has_hooks) {
    has_hooks_ = has_hooks;
    packed_.assign(packed_.size(), {});
    written_.clear();
  }
  void begin_backward(bool has_hooks);
  // Whether no gradient may be reduced in the program's memory in this step.
  bool shows_own() const { return shows_own_; }
  // An optimizer that runs in backward takes the averages out of the buckets.
  void leave_to_optimizer() { left_to_optimizer_ = true; }
  bool are_left_to_optimizer() const { return left_to_optimizer_; }

  // Called by a parameter's own hook.
  void note(int64_t param, const at::Tensor& grad, bool in_place) {
    packed_[param] = {grad.unsafeGetTensorImpl(), version_of(grad), in_place};
  }
  // Called before the average replaces it. Gradients that are views of one buffer share its counter, which tells nothing.
  void compare(int64_t param, const at::Tensor& grad) {
    const auto& then = packed_[param];
    const auto* const now = grad.unsafeGetTensorImpl();
    const bool was_written = now != then.tensor || (!grad.is_view() && version_of(grad) != then.version);
    if (then.tensor != nullptr && was_written) written_.push_back(param);
  }
  // At the end of the step. RuntimeError if a gradient was written while it was reduced, a warning if a write was lost.
  void report();

 private:
  struct Packed {
    const void* tensor = nullptr;  // null if there was none
    uint32_t version = 0;
    bool in_place = false;
  };

  static uint32_t version_of(const at::Tensor& grad) {
    return grad.defined() && !grad.is_inference() ? grad.unsafeGetTensorImpl()->version_counter().current_version() : 0;
  }

  const Context& context_;
  bool has_hooks_ = false;
  bool shows_own_ = false;
  bool left_to_optimizer_ = false;
  std::vector<Packed> packed_;    // by parameter
  std::vector<int64_t> written_;  // parameters
};

// Row ids that every rank announced before the step (torch's `_set_sparse_metadata`), by parameter name. With them only the
// values are sent: all ranks hold rows for the same ids, so the values are dense and have the same shape.
using SparseMetadata = std::map<std::string, at::Tensor>;

// The gradient of an unused parameter. It has the dimensions that gradients of embeddings have, because gloo aborts the process
// if they differ between ranks.
at::Tensor no_rows(const at::Tensor& param);

// In a bucket of its own; reduced as it is, or on an agreed set of row ids.
struct SparseGrad {
  at::Tensor gradient;
  std::optional<at::Tensor> row_ids;  // only with metadata
};

// The gradient of parameter `name`, times `scale`, in the form it is reduced in. In place if there is no metadata.
SparseGrad make_sparse_grad(const at::Tensor& grad, double scale, const std::string& name,
                            const std::optional<SparseMetadata>& metadata);

// What every packer asks before and after it packs a gradient.
class PackRules {
 public:
  PackRules(const Context& context, Step& step, BucketLayout& layout, NonFiniteWatch& non_finite, PackedGrads& packed)
      : context(context), step(step), layout(layout), non_finite(non_finite), packed(packed) {}

  // Whether a gradient that is not yet in its slot may be reduced where it is.
  bool may_adopt(const bucket::Bucket& bucket, const at::Tensor& grad, bool unused, const at::Tensor* incoming) const {
    return !unused && !packed.shows_own() && layout.gives_views(bucket) && !grad.requires_grad() &&
           context.rpc == nullptr && bucket::is_unshared(grad, incoming);
  }
  // The gradient was copied into its slot. With gradient_as_bucket_view=True the slot's view replaces it now, otherwise the
  // average does later.
  void copied(int64_t param, at::Tensor& grad, bool unused) const;
  // Called before a slot is overwritten: see Note [Gradients that the program keeps] in bucket/slot_view.h.
  void leave_to_holders(const BucketLayout::Place& place) const {
    if (!place.slot->leave_to_holders()) [[unlikely]] {
      place.bucket->move(*context.transport);
    }
  }
  // Throws if the gradient doesn't fit its slot.
  void check(int64_t param, const at::Tensor& grad) const;
  // The dtype of gradients, if it is not that of their parameters.
  void set_grad_dtype(std::optional<at::ScalarType> dtype) { grad_dtype_ = dtype; }

  const Context& context;
  Step& step;
  BucketLayout& layout;
  NonFiniteWatch& non_finite;
  PackedGrads& packed;

 private:
  std::optional<at::ScalarType> grad_dtype_;
};

// Warns once about backward(create_graph=True).
void warn_create_graph(const at::Tensor& grad);

}  // namespace torchddp::reducer
