#include "bucket/device_pieces.h"

#include <ATen/Functions.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <c10/core/GradMode.h>

#include <span>

#include "common/check.h"
#include "transport/cuda/cuda_device.h"
#include "transport/sum_types.h"

namespace torchddp::bucket {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor tensor_at(void* data, int64_t numel, kernels::DType dtype, at::Device device) {
  return at::for_blob(data, {numel})
      .options(at::TensorOptions().dtype(transport::scalar_type(dtype)).device(device))
      .target_device(device)
      .make_tensor();
}

// Except for what is already in place.
void copy_if_elsewhere(const Tensors& to, const Tensors& from) {
  Tensors targets;
  Tensors sources;
  for (size_t i = 0; i < to.size(); ++i) {
    if (to[i].const_data_ptr() != from[i].const_data_ptr()) {
      targets.push_back(to[i]);
      sources.push_back(from[i]);
    }
  }
  if (!targets.empty()) {  // operators don't accept an empty list
    at::_foreach_copy_(targets, sources);
  }
}

// kernels::move_on_device with torch's operators, for devices that our kernels were not built for. Gives the same bits, on the
// current stream, for all pieces at once. `slot`: any slot of the bucket.
void move_by_operators(kernels::Direction direction, const GradSlot& slot, std::span<const kernels::DevicePiece> pieces,
                       kernels::DType outside_type, double scale) {
  const c10::NoGradGuard no_grad;
  const bool pack = direction == kernels::Direction::kPack;
  const auto flat_type = slot.kernel_dtype();
  Tensors to;
  Tensors from;
  for (const auto& piece : pieces) {
    if (piece.numel != 0) {
      auto* const in_flat = static_cast<std::byte*>(slot.flat_data()) + piece.begin * kernels::item_size(flat_type);
      const auto flat = tensor_at(in_flat, piece.numel, flat_type, slot.device());
      const auto outside = tensor_at(piece.outside, piece.numel, outside_type, slot.device());
      to.push_back(pack ? flat : outside);
      from.push_back(pack ? outside : flat);
    }
  }
  if (scale == 1.0 || to.empty()) {
    copy_if_elsewhere(to, from);
    return;
  }
  TDDP_CHECK(kernels::is_float(flat_type) && kernels::is_float(outside_type), "gradients of dtype ",
             transport::scalar_type(outside_type), " can't be scaled");
  // The product is formed in float or wider, and rounded once.
  const auto product = c10::promoteTypes(
      at::kFloat, c10::promoteTypes(transport::scalar_type(flat_type), transport::scalar_type(outside_type)));
  if (product == to.front().scalar_type()) {
    copy_if_elsewhere(to, from);
    at::_foreach_mul_(to, scale);
    return;
  }
  Tensors products;
  for (const auto& source : from) {
    products.push_back(at::empty(source.sizes(), source.options().dtype(product)));
  }
  at::_foreach_copy_(products, from);
  at::_foreach_mul_(products, scale);
  at::_foreach_copy_(to, products);
}

void move_pieces(kernels::Direction direction, const GradSlot& slot, std::span<const kernels::DevicePiece> pieces,
                 kernels::DType dtype, double scale) {
  if (!transport::move_by_kernels(direction, slot.flat_data(), slot.kernel_dtype(), pieces, dtype, scale,
                                  slot.device())) {
    move_by_operators(direction, slot, pieces, dtype, scale);
  }
}

}  // namespace

void DevicePieces::add(GradSlot& slot, const at::Tensor& gradient) {
  const bool pack = direction_ == Direction::kPack;
  const bool waits = transport::is_gpu(slot.device()) || (together_ && slot.device().is_cpu());
  // A gradient that lies elsewhere in the bucket would be overwritten before it is read.
  const auto outside = waits && pack && slot.overlaps(gradient) && !slot.holds(gradient) ? gradient.clone() : gradient;
  if (const auto piece = waits ? slot.piece_of(outside) : std::nullopt) {
    pieces_[static_cast<size_t>(piece->dtype)].push_back(piece->memory);
    gradients_.push_back(outside);
    any_slot_ = &slot;
  } else if (pack) {
    slot.pack(gradient, scale_);
  } else {
    slot.unpack(gradient);
  }
}

void DevicePieces::run() {
  if (!copies_.empty()) {
    const c10::NoGradGuard no_grad;
    at::_foreach_copy_(copies_, copied_);
  }
  for (size_t dtype = 0; dtype < pieces_.size(); ++dtype) {
    if (!pieces_[dtype].empty()) {
      move_pieces(direction_, *any_slot_, pieces_[dtype], static_cast<kernels::DType>(dtype), scale_);
    }
  }
}

}  // namespace torchddp::bucket
