// Rules for a gradient on its way into a bucket, however it is packed.
#pragma once

#include <optional>

#include "reducer/base/step.h"
#include "reducer/pack/packed_grads.h"
#include "reducer/reduce/layout.h"
#include "reducer/report/non_finite_watch.h"

namespace torchddp::reducer {

class PackRules {
 public:
  PackRules(const Context& context, Step& step, BucketLayout& layout, NonFiniteWatch& non_finite, PackedGrads& packed)
      : context(context), step(step), layout(layout), non_finite(non_finite), packed(packed) {}

  // Whether a gradient that is not yet in its slot may be reduced where it is.
  bool may_adopt(const bucket::Bucket& bucket, const at::Tensor& grad, bool unused, const at::Tensor* incoming) const;
  // The gradient was copied into its slot. With gradient_as_bucket_view=True the slot's view replaces it now, otherwise the
  // average does later.
  void copied(int64_t param, at::Tensor& grad, bool unused) const;
  // Called before a slot is overwritten: see Note [Gradients that the program keeps] in bucket/slot_view.h.
  void leave_to_holders(const BucketLayout::Place& place) const;
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
