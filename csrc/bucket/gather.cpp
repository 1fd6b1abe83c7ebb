#include "bucket/gather.h"

#include <ATen/Functions.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <c10/core/GradMode.h>

#include "bucket/device_pieces.h"

namespace torchddp::bucket {

void Gather::run() {
  const c10::NoGradGuard no_grad;
  if (pairs_.empty()) {
    return;
  }
  if (DevicePieces::available(pairs_.front().slot->device())) {
    DevicePieces pieces;
    for (const auto& [slot, gradient] : pairs_) {
      if (!pieces.add(*slot, gradient)) {
        slot->pack(gradient, scale_);
      }
    }
    pieces.pack(scale_);
    return;
  }
  // Devices that we have no kernels for: two operators for the bucket.
  std::vector<at::Tensor> targets;
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> all;
  for (const auto& [slot, gradient] : pairs_) {
    all.push_back(slot->view());
    if (!gradient.is_same(slot->view())) {
      targets.push_back(slot->view());
      sources.push_back(gradient);
    }
  }
  if (!targets.empty()) {
    at::_foreach_copy_(targets, sources);
  }
  if (scale_ != 1.0) {
    at::_foreach_mul_(all, scale_);
  }
}

void Scatter::run() {
  const c10::NoGradGuard no_grad;
  if (pairs_.empty()) {
    return;
  }
  if (DevicePieces::available(pairs_.front().slot->device())) {
    DevicePieces pieces;
    for (const auto& [slot, gradient] : pairs_) {
      if (!pieces.add(*slot, gradient)) {
        slot->unpack(gradient);
      }
    }
    pieces.unpack();
    return;
  }
  std::vector<at::Tensor> targets;
  std::vector<at::Tensor> sources;
  for (const auto& [slot, gradient] : pairs_) {
    targets.push_back(gradient);
    sources.push_back(slot->view());
  }
  at::_foreach_copy_(targets, sources);
}

}  // namespace torchddp::bucket
