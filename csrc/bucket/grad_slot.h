// One gradient's place in a bucket's flat memory: packing into it and reading back.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "kernels/pack.h"
#include "transport/transport.h"

namespace torchddp::bucket {

// Note [Adopted gradients]
// A large gradient that has a bucket of its own need not be copied into it: its memory becomes the bucket's for this step. The
// flat tensor is re-pointed, nothing is allocated. The slot keeps the gradient alive until the next one comes, so that memory
// rotates between steps as it does when a bucket is copied into.
//
// Note [Gradients that the program keeps]
// With torch's default a gradient has memory of its own: what a program keeps of it (param.grad, a view, detach()) stays as it was
// when zero_grad() has set param.grad to None and the next step makes another. To give the same, the view of a slot has a storage
// of its own over the bucket's memory. Before a slot is overwritten, reference counts tell whether anything but the slot refers to
// the view or its storage. If so, that storage gets a copy of the values as its memory, and the slot a new view. The memory of NumPy
// arrays can't be changed (torch marks such storages as not resizable): then it is the bucket that gets other memory. Likewise a
// gradient that the program holds when it comes (param.grad was assigned, a hook kept it) is copied back into at the end of
// backward, where others are replaced by the view. With gradient_as_bucket_view=True, views share the bucket's storage as torch's do,
// and what is kept changes.

// Whether the gradient that autograd has just written to param.grad is referred to by param.grad alone: neither the tensor nor its
// memory by anything else. `incoming`: the tensor that autograd handed to the parameter and still holds, or null.
bool is_unshared(const at::Tensor& grad, const at::Tensor* incoming);

enum class ViewStorage : uint8_t { kOwn, kBucket };

// Not thread-safe per slot; different slots of one bucket may be packed by different threads.
class GradSlot {
 public:
  GradSlot() = default;
  // `flat`: the bucket's 1-d memory. The slot takes the layout that autograd gives the gradient of `param`: the strides of a
  // parameter whose memory is dense, row-major otherwise.
  GradSlot(const at::Tensor& flat, int64_t offset, const at::Tensor& param, ViewStorage view_storage);

  // The slot as a gradient: same shape as the parameter. It is no autograd view of `flat` (so that detach_() works on it).
  const at::Tensor& view() const { return view_; }
  int64_t numel() const { return numel_; }
  at::ScalarType dtype() const { return dtype_; }
  bool on_cpu() const { return on_cpu_; }
  at::Device device() const { return flat_.device(); }
  c10::IntArrayRef sizes() const { return sizes_; }

  // Whether `grad`'s elements are this slot's memory, in its layout: then there is nothing to copy.
  bool holds(const at::Tensor& grad) const {
    return grad.unsafeGetTensorImpl() == view_.unsafeGetTensorImpl() ? view_is_intact() : holds_slow(grad);
  }

  // flat <- grad * scale, if `grad` is an ordinary CPU tensor of the slot's own dtype and layout: no dispatcher call. False, and
  // nothing done, otherwise.
  // `non_finite`, if there is one, gets the number of infinities and NaNs in `grad`.
  bool try_pack(const at::Tensor& grad, double scale, int64_t* non_finite = nullptr) {
    if (!is_plain(grad)) [[unlikely]] {
      return false;
    }
    pack_plain(grad.const_data_ptr(), scale, non_finite);
    return true;
  }
  // The same for any gradient of the parameter's shape: every layout, and every dtype that converts.
  void pack(const at::Tensor& grad, double scale);
  // Takes the memory of `grad`, which must be unshared, as the slot's, under the conditions of try_pack and if the slot may: see
  // Note [Adopted gradients].
  bool adopt(const at::Tensor& grad);
  // The slot is all of its bucket: it may take any memory that the bucket's transport reaches.
  void allow_adoption(const transport::Transport& transport) { adopter_ = &transport; }
  // flat <- flat * scale, for a gradient that was accumulated in place.
  void scale_in_place(double scale);
  void zero();
  // grad <- slot. `grad` has memory of its own.
  void unpack(const at::Tensor& grad) const;

  // For kernels that move many gradients at once: a gradient of the slot's layout, as what it is in memory.
  struct Piece {
    void* data;
    int64_t begin;  // in flat_data()
    int64_t numel;
    kernels::DType dtype;
  };
  // None if the gradient is laid out otherwise, or neither of the slot's dtype nor convertible.
  std::optional<Piece> piece_of(const at::Tensor& grad) const;
  void* flat_data() const { return flat_.mutable_data_ptr(); }
  kernels::DType kernel_dtype() const { return kernel_dtype_; }

  // A gradient with memory of its own, equal to the slot.
  at::Tensor clone() const;
  // The flat tensor was given other memory.
  void rebind();
  // The flat tensor's memory goes; the slot is of no use until rebind() or adopt().
  void let_go();
  bool has_memory() const { return data_ != nullptr; }
  // User code may have re-pointed the view (`p.grad.data = x`): then the slot needs a new one before it is handed out again.
  void restore_view();
  // Before the slot is overwritten by what is not its gradient: see Note [Gradients that the program keeps]. False if the bucket must
  // get other memory.
  bool leave_to_holders() { return view_storage_ == ViewStorage::kBucket || !is_held() || part_from_holders(); }
  // The flat tensor was given other memory with the same values: the view and what is kept of it move there. False if they can't.
  bool follow();

 private:
  bool view_is_intact() const { return view_.const_data_ptr() == data_; }
  bool is_plain(const at::Tensor& grad) const;
  bool holds_slow(const at::Tensor& grad) const;
  bool lies_as_slot(const at::Tensor& grad) const;
  void pack_plain(const void* source, double scale, int64_t* non_finite = nullptr);
  bool overlaps(const at::Tensor& grad) const;
  // Whether anything but the slot refers to the view or its storage.
  bool is_held() const;
  bool part_from_holders();
  size_t bytes() const { return static_cast<size_t>(numel_) * c10::elementSize(dtype_); }
  std::byte* address() const {
    return static_cast<std::byte*>(flat_.storage().mutable_data()) +
           (flat_.storage_offset() + offset_) * static_cast<int64_t>(c10::elementSize(dtype_));
  }
  // `keeps`, if there is any, lives as long as the memory is used.
  c10::DataPtr memory(c10::DataPtr keeps = {}) const;
  // The slot as a tensor, for use here.
  at::Tensor in_bucket() const;
  at::Tensor make_view();
  void forget_view();

  // What a hook reads comes first: one cache line a gradient in a steady step.
  at::Tensor view_;
  void* data_ = nullptr;
  c10::Storage storage_;  // of the view, if it has one of its own
  bool adopted_ = false;  // it is that of the flat tensor too
  ViewStorage view_storage_ = ViewStorage::kOwn;
  c10::DispatchKeySet plain_keys_;
  int64_t kernel_numel_ = 0;  // elements as the kernels count them: a complex one is two
  int64_t numel_ = 0;
  std::vector<int64_t> strides_;
  at::ScalarType dtype_ = at::ScalarType::Undefined;
  kernels::DType kernel_dtype_ = kernels::DType::kF32;
  bool on_cpu_ = false;
  const transport::Transport* adopter_ = nullptr;

  std::vector<int64_t> sizes_;
  int64_t offset_ = 0;
  at::Tensor flat_;
};

}  // namespace torchddp::bucket
