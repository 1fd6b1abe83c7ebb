// What several files of the Reducer use.
#pragma once

#include "reducer/reducer.h"

namespace torchddp::reducer {

// Of Reducer::marked_.
inline constexpr uint8_t kNotMarked = 0, kMarked = 1, kMarkedUnused = 2;

// What a wait in several places is for, in reports.
inline constexpr const char* kWaitsForUsedMap = "which parameters other ranks used";

template <typename Callback>
void Reducer::with_grad(int64_t param, Callback&& callback) {
  const auto& variable = params_[static_cast<size_t>(param)];
  if (rpc_context_ != nullptr) [[unlikely]] {
    // Under distributed autograd gradients live in the context, not in .grad.
    auto handle = variable;
    rpc_context_->runGradCallbackForVariable(handle, [&](at::Tensor& grad) {
      callback(grad);
      return true;
    });
    return;
  }
  callback(variable.mutable_grad());
}

}  // namespace torchddp::reducer
