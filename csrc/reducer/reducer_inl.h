// Templates of the Reducer that several of its files use.
#pragma once

#include "reducer/reducer.h"

namespace torchddp::reducer {

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
