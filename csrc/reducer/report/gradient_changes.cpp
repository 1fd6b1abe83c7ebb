#include "reducer/report/gradient_changes.h"

#include <utility>

#include "kernels/hash.h"

namespace torchddp::reducer {

void GradientChanges::note() {
  wanted_ = false;
  noted_.clear();
  if (context_.rpc != nullptr || context_.is_captured()) {
    return;
  }
  for (int64_t param = 0; param < context_.num_params(); ++param) {
    noted_.push_back(look_at(param));
  }
}

std::vector<GradChange> GradientChanges::take() {
  std::vector<GradChange> changes;
  const auto before = std::exchange(noted_, {});
  for (int64_t param = 0; param < static_cast<int64_t>(before.size()); ++param) {
    const auto& then = before[static_cast<size_t>(param)];
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
  const auto& grad = context_.params[static_cast<size_t>(param)].grad();
  if (!grad.defined()) {
    return {};
  }
  Noted noted{.tensor = grad.unsafeGetTensorImpl()};
  if (!grad.is_inference()) {
    noted.version = grad._version();
  }
  if (grad.is_cpu() && grad.layout() == at::kStrided && grad.is_non_overlapping_and_dense()) {
    noted.hash = kernels::hash_bytes(grad.const_data_ptr(), static_cast<int64_t>(grad.nbytes()));
  }
  return noted;
}

}  // namespace torchddp::reducer
