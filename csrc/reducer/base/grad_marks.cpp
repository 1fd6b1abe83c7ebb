#include "reducer/base/grad_marks.h"

namespace torchddp::reducer {

uint32_t GradMarks::version_of(int64_t param, const at::Tensor& grad) const {
  const auto& seen = context_.main_grads == nullptr ? grad : context_.main_grads->shown()[static_cast<size_t>(param)];
  return seen.is_inference() ? 0 : seen.unsafeGetTensorImpl()->version_counter().current_version();
}

void GradMarks::note(int64_t param, const at::Tensor& grad) {
  auto& mark = marks_[static_cast<size_t>(param)];
  if (!has(param, grad)) {
    mark.tensor.emplace(grad.getIntrusivePtr());
  }
  mark.version = version_of(param, grad);
}

bool GradMarks::has(int64_t param, const at::Tensor& grad) const {
  const auto& tensor = marks_[static_cast<size_t>(param)].tensor;
  return grad.defined() && tensor && tensor->_unsafe_get_target() == grad.unsafeGetTensorImpl();
}

bool GradMarks::is_intact(int64_t param, const at::Tensor& grad) const {
  return has(param, grad) && marks_[static_cast<size_t>(param)].version == version_of(param, grad);
}

void GradMarks::follow(int64_t param, bool same, bool intact) {
  if (const auto& grad = context_.kept_grad(param); same && grad.defined()) {
    note(param, grad);
    marks_[static_cast<size_t>(param)].version -= intact ? 0 : 1;
  }
}

void GradMarks::take_over(const GradMarks& before, std::span<const int64_t> places) {
  for (int64_t param = 0; param < context_.num_params(); ++param) {
    if (const auto place = places[static_cast<size_t>(param)]; place != kNotThere) {
      const auto& grad = before.context_.kept_grad(place);
      follow(param, before.has(place, grad), before.is_intact(place, grad));
    }
  }
}

}  // namespace torchddp::reducer
