#include "reducer/base/grad_marks.h"

#include "kernels/hash.h"

namespace torchddp::reducer {

bool GradMarks::is_intact(int64_t param, const at::Tensor& grad) const {
  return has(param, grad) && marks_[param].version == version_of(param, grad);
}

void GradMarks::follow(int64_t param, bool same, bool intact) {
  if (const auto& grad = context_.kept_grad(param); same && grad.defined()) {
    note(param, grad);
    marks_[param].version -= intact ? 0 : 1;
  }
}

void GradMarks::take_over(const GradMarks& before, std::span<const int64_t> places) {
  for (int64_t param = 0; param < context_.num_params(); ++param) {
    if (const auto place = places[param]; place != kNotThere) {
      const auto& grad = before.context_.kept_grad(place);
      follow(param, before.has(place, grad), before.is_intact(place, grad));
    }
  }
}

std::vector<GradChange> GradientChanges::take() {
  std::vector<GradChange> changes;
  const auto before = std::exchange(noted_, {});
  for (int64_t param = 0; param < std::ssize(before); ++param) {
    const auto& then = before[param];
    const auto now = look_at(param);
    if (now.tensor == then.tensor) {
      const bool same = now.version == then.version && now.hash == then.hash;
      changes.push_back(same ? GradChange::kNone : GradChange::kChanged);
    } else {
      changes.push_back(now.tensor == nullptr ? GradChange::kGone : GradChange::kReplaced);
    }
  }
  return changes;
}

GradientChanges::Noted GradientChanges::look_at(int64_t param) const {
  const auto& grad = context_.params[param].grad();
  if (!grad.defined()) return {};
  Noted noted{.tensor = grad.unsafeGetTensorImpl()};
  if (!grad.is_inference()) noted.version = grad._version();
  if (grad.is_cpu() && grad.layout() == at::kStrided && grad.is_non_overlapping_and_dense()) {
    noted.hash = kernels::hash_bytes(grad.const_data_ptr(), static_cast<int64_t>(grad.nbytes()));
  }
  return noted;
}

}  // namespace torchddp::reducer
