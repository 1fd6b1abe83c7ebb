// One gradient's place in a bucket's flat memory: packing into it and reading back.
#pragma once

#include <optional>

#include "bucket/slot_view.h"
#include "kernels/pack_cuda.h"
#include "transport/transport.h"

namespace torchddp::bucket {

// Note [Adopted gradients]
// A large gradient that has a bucket of its own need not be copied into it: its memory becomes the bucket's for this step. The
// flat tensor is re-pointed, nothing is allocated. The slot keeps the gradient alive until the next one comes, so that memory
// rotates between steps as it does when a bucket is copied into.
//
// On a device the large gradients of a bucket lie apart (`adopt_bytes`), each reduced where it is, and only the small ones are
// packed. Such a slot has memory from the time when its bucket is complete to the end of the step: that of the gradient, which stays
// param.grad, or, where it can't be taken (another layout, shared, part of a graph, none), memory for this step alone. Which slots
// lie apart follows from the plan, so it is the same on all ranks, whatever their gradients are.

// Not thread-safe per slot; different slots of one bucket may be packed by different threads.
class GradSlot : public SlotView {
 public:
  using SlotView::SlotView;

  // flat <- grad * scale, if `grad` is an ordinary CPU tensor of grad_dtype() and the slot's layout: no dispatcher call. False, and
  // nothing done, otherwise.
  // `non_finite`, if there is one, gets the number of infinities and NaNs in `grad`.
  bool try_pack(const at::Tensor& grad, double scale, int64_t* non_finite = nullptr) {
    if (!is_plain(grad)) [[unlikely]] {
      return false;
    }
    pack_plain(grad.const_data_ptr(), grad_kernel_dtype_, scale, non_finite);
    return true;
  }
  // The same for any gradient of the parameter's shape: every layout, and every dtype that converts.
  void pack(const at::Tensor& grad, double scale);
  // flat <- flat + grad, in the slot's dtype; any gradient of the parameter's shape.
  void add(const at::Tensor& grad);
  // Takes the memory of `grad`, which must be unshared, as the slot's, under the conditions of try_pack and if the slot may: see
  // Note [Adopted gradients].
  bool adopt(const at::Tensor& grad);
  // The slot is all of its flat tensor: it may take any memory that the bucket's transport reaches.
  void allow_adoption(const transport::Transport& transport) { adopter_ = &transport; }
  // The flat tensor is the slot's alone, and has memory only from take_fresh_memory() or adopt() to release_if_apart().
  void lie_apart(const transport::Transport& transport);
  bool is_apart() const { return is_apart_; }
  void take_fresh_memory();
  void release_if_apart();
  const at::Tensor& flat() const { return flat_; }
  // flat <- flat * scale, for a gradient that was accumulated in place.
  void scale_in_place(double scale);
  void zero();
  // grad <- slot. `grad` has memory of its own.
  void unpack(const at::Tensor& grad) const;
  // A gradient with memory of its own, equal to the slot.
  at::Tensor clone() const { return clone_as(dtype_); }
  at::Tensor clone_as(at::ScalarType dtype) const;

  // For kernels that move many gradients at once: a gradient of the slot's layout, as what it is in memory. None if it is laid out
  // otherwise, or neither of the slot's dtype nor convertible, or if the slot lies apart.
  struct Piece {
    kernels::DType dtype;
    kernels::DevicePiece memory;
  };
  std::optional<Piece> piece_of(const at::Tensor& grad) const;
  // Whether `grad` begins in the bucket's memory.
  bool overlaps(const at::Tensor& grad) const;
  void* flat_data() const { return flat_.mutable_data_ptr(); }
  kernels::DType kernel_dtype() const { return kernel_type_.dtype; }

 private:
  void pack_plain(const void* source, kernels::DType source_dtype, double scale, int64_t* non_finite = nullptr);

  const transport::Transport* adopter_ = nullptr;
  bool is_apart_ = false;
};

}  // namespace torchddp::bucket
