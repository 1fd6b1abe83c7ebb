// Rules for a gradient on its way into a bucket, however it is packed.
#pragma once

#include <optional>

#include "reducer/base/step.h"
#include "reducer/reduce/layout.h"
#include "reducer/report/non_finite_watch.h"

namespace torchddp::reducer {

class PackRules {
 public:
  PackRules(const Context& context, Step& step, BucketLayout& layout, NonFiniteWatch& non_finite)
      : context(context), step(step), layout(layout), non_finite(non_finite) {}

  // Whether the slot's view replaces a gradient that is not yet in its slot. If not, the average is copied back.
  bool becomes_view(const bucket::Bucket& bucket, const at::Tensor& grad, bool unused,
                    const at::Tensor* incoming) const;
  // Called before a slot is overwritten: see Note [Gradients that the program keeps] in bucket/slot_view.h.
  void leave_to_holders(const BucketLayout::Place& place) const;
  // Throws if the gradient doesn't fit its slot.
  void check(int64_t param, const at::Tensor& grad) const;
  // The program's gradient tensor stays in place; the end of the step copies the average into it.
  void stays(int64_t param, const at::Tensor& grad) const;
  // The dtype of gradients, if it is not that of their parameters.
  void set_grad_dtype(std::optional<at::ScalarType> dtype) { grad_dtype_ = dtype; }

  const Context& context;
  Step& step;
  BucketLayout& layout;
  NonFiniteWatch& non_finite;

 private:
  std::optional<at::ScalarType> grad_dtype_;
};

// Warns once about backward(create_graph=True).
void warn_create_graph(const at::Tensor& grad);

}  // namespace torchddp::reducer
