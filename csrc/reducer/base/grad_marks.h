// What the program has done with gradients since the reducer last saw them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "reducer/base/context.h"

namespace torchddp::reducer {

// Which gradients the program has replaced or written. A mark survives that the reducer moves the gradient to another bucket.
// It keeps no memory but that of the tensor object, whose address is therefore not used again.
class GradMarks {
 public:
  explicit GradMarks(const Context& context) : context_(context), marks_(context.params.size()) {}

  void note(int64_t param, const at::Tensor& grad) {
    auto& mark = marks_[param];
    if (!has(param, grad)) mark.tensor.emplace(grad.getIntrusivePtr());
    mark.version = version_of(param, grad);
  }
  // Whether `grad` is the tensor that was there then, and whether nothing was written to it either.
  bool has(int64_t param, const at::Tensor& grad) const {
    const auto& tensor = marks_[param].tensor;
    return grad.defined() && tensor && tensor->_unsafe_get_target() == grad.unsafeGetTensorImpl();
  }
  bool is_intact(int64_t param, const at::Tensor& grad) const;

  // `move` puts the same values into another tensor.
  template <typename Move>
  void across(int64_t param, Move&& move) {
    const auto& grad = context_.kept_grad(param);
    const auto [same, intact] = std::pair(has(param, grad), is_intact(param, grad));
    move();
    follow(param, same, intact);
  }
  // Takes over from a previous reducer. `places`: each parameter's index there, or kNotThere.
  void take_over(const GradMarks& before, std::span<const int64_t> places);

 private:
  struct Mark {
    std::optional<c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>> tensor;
    uint32_t version = 0;
  };

  uint32_t version_of(int64_t param, const at::Tensor& grad) const {
    const auto& seen = context_.main_grads == nullptr ? grad : context_.main_grads->shown()[param];
    return seen.is_inference() ? 0 : seen.unsafeGetTensorImpl()->version_counter().current_version();
  }
  void follow(int64_t param, bool same, bool intact);

  const Context& context_;
  std::vector<Mark> marks_;  // by parameter
};

enum class GradChange : uint8_t { kNone, kChanged, kGone, kReplaced };

// Whether gradients have changed since they were handed back. Costs nothing except in the requested steps. In those it compares
// version counters and, on the CPU, a hash of the values, because changes through `.data` do not bump the version.
class GradientChanges {
 public:
  explicit GradientChanges(const Context& context) : context_(context) {}

  // Records the gradients of the next step when they are handed back.
  void note_next() { wanted_ = true; }
  void handed_back() {
    if (wanted_) [[unlikely]] {
      note();
    }
  }
  // By parameter, the changes since then; empty if nothing was recorded. Forgets the record.
  std::vector<GradChange> take();

 private:
  struct Noted {
    const void* tensor = nullptr;  // null if there was no gradient
    int64_t version = 0;
    uint64_t hash = 0;
  };

  Noted look_at(int64_t param) const;
  void note() {
    wanted_ = false;
    noted_.clear();
    if (context_.rpc != nullptr || context_.is_captured()) return;
    for (int64_t param = 0; param < context_.num_params(); ++param) noted_.push_back(look_at(param));
  }

  const Context& context_;
  bool wanted_ = false;
  std::vector<Noted> noted_;  // by parameter, or empty
};

}  // namespace torchddp::reducer
