// One gradient's place in a bucket's flat memory: packing into it, and reading back.
#pragma once

#include <optional>

#include "bucket/slot_view.h"
#include "kernels/pack_cuda.h"
#include "transport/transport.h"

namespace torchddp::bucket {

// Note [Adopted gradients]
// A large gradient with a bucket of its own need not be copied: its memory becomes the bucket's for this step. The flat tensor
// is re-pointed and nothing is allocated. The slot keeps the gradient alive until the next one arrives, so memory rotates
// between steps as it does when a bucket is copied into.
//
// On a device, the large gradients of a bucket are reduced in place (`in_place_bytes`) and only the small ones are
// packed. Such a slot has memory from the moment its bucket is complete until the end of the step: the gradient's own, which
// stays param.grad, or, where that can't be used (another layout, shared, part of a graph, missing), temporary memory for this
// step. Which slots these are follows from the plan, so it is the same on all ranks, whatever their gradients are.

// Not thread-safe per slot; different slots of one bucket may be packed by different threads.
class GradSlot : public SlotView {
 public:
  using SlotView::SlotView;

  // flat <- grad * scale without a dispatcher call, if `grad` is an ordinary CPU tensor of grad_dtype() and has the slot's
  // layout. Otherwise returns false and does nothing. `non_finite`, if not null, receives the number of infinities and NaNs in
  // `grad`.
  bool try_pack(const at::Tensor& grad, double scale, int64_t* non_finite = nullptr) {
    if (!is_plain(grad)) [[unlikely]] {
      return false;
    }
    pack_plain(grad.const_data_ptr(), grad_kernel_dtype_, scale, non_finite);
    return true;
  }
  // The same for any gradient of the parameter's shape, in any layout and any convertible dtype.
  void pack(const at::Tensor& grad, double scale);
  // flat <- flat + grad, in the slot's dtype; any gradient of the parameter's shape.
  void add(const at::Tensor& grad);
  // Takes over the memory of `grad`, which must be unshared, as the slot's memory, under the conditions of try_pack and if
  // adoption is allowed: see Note [Adopted gradients].
  bool adopt(const at::Tensor& grad) {
    if (adopter_ == nullptr || !is_ordinary(grad) || !adopter_->reaches(grad)) return false;
    take_memory(grad);
    return true;
  }
  // The slot fills its flat tensor, so it may adopt any memory that the bucket's transport reaches.
  void allow_adoption(const transport::Transport& transport) { adopter_ = &transport; }
  // The flat tensor belongs to the slot alone, and has memory only from take_fresh_memory() or adopt() until
  // release_if_in_place().
  void lie_in_place(const transport::Transport& transport) {
    allow_adoption(transport);
    is_in_place_ = true;
    release_if_in_place();
  }
  bool is_in_place() const { return is_in_place_; }
  void take_fresh_memory();
  void release_if_in_place();
  const at::Tensor& flat() const { return flat_; }
  // flat <- flat * scale, for a gradient that was accumulated in place.
  void scale_in_place(double scale);
  void zero();
  // grad <- slot, where `grad` has its own memory.
  void unpack(const at::Tensor& grad) const;
  // A gradient with its own memory.
  at::Tensor clone() const;

  // For kernels that move many gradients at once: a gradient of the slot's layout as raw memory. Empty if its layout differs,
  // its dtype is neither the slot's nor convertible, or it is reduced in place.
  struct Piece {
    kernels::DType dtype;
    kernels::DevicePiece memory;
  };
  std::optional<Piece> piece_of(const at::Tensor& grad) const;
  // Whether `grad` begins in the bucket's memory.
  bool overlaps(const at::Tensor& grad) const {
    if (grad.layout() != at::kStrided || !grad.has_storage() || grad.numel() == 0) return false;
    const auto* const begin = static_cast<const std::byte*>(flat_.const_data_ptr());
    const auto* const data = static_cast<const std::byte*>(grad.const_data_ptr());
    return data >= begin && data < begin + flat_.nbytes();
  }
  void* flat_data() const { return flat_.mutable_data_ptr(); }
  kernels::DType kernel_dtype() const { return kernel_type_.dtype; }

 private:
  void pack_plain(const void* source, kernels::DType source_dtype, double scale, int64_t* non_finite = nullptr);

  const transport::Transport* adopter_ = nullptr;
  bool is_in_place_ = false;
};

}  // namespace torchddp::bucket
