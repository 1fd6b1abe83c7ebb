// One gradient's memory in its bucket, and the view of it that the program gets.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "transport/sum_types.h"

namespace torchddp::bucket {

// Note [Gradients that the program keeps]
// With torch's default, a gradient has its own memory: whatever a program keeps of it (param.grad, a view, detach()) stays as
// it was after zero_grad() has set param.grad to None and the next step makes a new one. To match that, the view of a slot has
// its own storage over the bucket's memory. Before a slot is overwritten, reference counts tell whether anything else refers to
// the view or its storage. If so, that storage gets a copy of the values as its memory, and the slot a new view. The memory of
// a NumPy array can't be changed (torch marks such storages as not resizable), so there the bucket gets new memory instead.
// Likewise, if the program holds a gradient when it arrives (param.grad was assigned, a hook kept it), the average is copied
// back into it at the end of backward instead of replacing it with the view. With gradient_as_bucket_view=True, views share the
// bucket's storage as torch's do, and kept ones change.

// Whether param.grad is the only reference to the gradient that autograd just wrote there, both to the tensor and to its
// memory. `incoming`: the tensor that autograd handed to the parameter and still holds, or null.
bool is_unshared(const at::Tensor& grad, const at::Tensor* incoming);

enum class ViewStorage : uint8_t { kOwn, kBucket };

// How a bucket stores gradients.
struct GradStorage {
  at::ScalarType dtype;       // of the bucket's memory
  at::ScalarType grad_dtype;  // of incoming gradients, and of the program's tensors that averages are copied back to
  ViewStorage view_storage = ViewStorage::kOwn;
  bool views = true;      // gradients may become views of the bucket; otherwise averages are copied back
  bool may_adopt = true;  // see Note [Adopted gradients] in grad_slot.h
};

class SlotView {
 public:
  // `flat`: the bucket's 1-d memory. The view has the layout that autograd gives the gradient of `param`: the parameter's
  // strides if its memory is dense, row-major otherwise.
  SlotView(const at::Tensor& flat, int64_t offset, const at::Tensor& param, const GradStorage& storage);

  // The slot as a gradient: same shape as the parameter. It is no autograd view of `flat` (so that detach_() works on it).
  const at::Tensor& view() const { return view_; }
  int64_t numel() const { return numel_; }
  at::ScalarType dtype() const { return dtype_; }
  at::ScalarType grad_dtype() const { return grad_dtype_; }
  at::Device device() const { return flat_.device(); }
  c10::IntArrayRef sizes() const { return sizes_; }

  // Whether `grad`'s elements are this slot's memory in its layout, so that nothing needs copying.
  bool holds(const at::Tensor& grad) const {
    return grad.unsafeGetTensorImpl() == view_.unsafeGetTensorImpl() ? is_intact() : holds_slow(grad);
  }
  bool has_memory() const { return data_ != nullptr; }
  // The flat tensor's storage got other memory, from the program: share_memory_() on a gradient that has the same storage.
  bool is_displaced() const { return data_ != nullptr && numel_ != 0 && address() != data_; }

  // User code may have re-pointed the view (`p.grad.data = x`): then the slot needs a new one before it is handed out again.
  void restore_view() {
    if (!view_.defined() || !is_intact()) view_ = make_view();
  }
  // Called before something other than its gradient overwrites the slot: see Note [Gradients that the program keeps]. False if
  // the bucket must get new memory.
  bool leave_to_holders() { return view_storage_ == ViewStorage::kBucket || !is_held() || part_from_holders(); }
  // The flat tensor now has different memory.
  void rebind() {
    release_memory();
    data_ = address();
  }
  // The flat tensor now has different memory with the same values; the view and anything kept of it move there if they can.
  void follow();
  // Another tensor over the slot's memory, with a storage of its own: `shown`, which is made if it is undefined and stays the
  // same tensor when the slot is another one.
  void show_as(at::Tensor& shown) const;
  // The flat tensor's memory goes; the slot is of no use until it has some again.
  void release_memory() {
    view_.reset();
    storage_ = {};
    adopted_ = false;
    data_ = nullptr;
  }
  // The slot as a tensor, not to be handed out.
  at::Tensor in_bucket() const;

 protected:
  // Whether `grad` is an ordinary CPU tensor of grad_dtype() and the slot's layout.
  bool is_plain(const at::Tensor& grad) const {
    const auto* impl = grad.unsafeGetTensorImpl();
    return on_cpu_ && impl->key_set() == plain_keys_ && impl->dtype() == c10::scalarTypeToTypeMeta(grad_dtype_) &&
           impl->strides() == c10::IntArrayRef(strides_) && impl->numel() == numel_;
  }
  // Whether `grad` is an ordinary tensor of the slot's own device, dtype and layout; a stride means nothing where there is one
  // element.
  bool is_ordinary(const at::Tensor& grad) const {
    const auto* impl = grad.unsafeGetTensorImpl();
    return impl->key_set() == plain_keys_ && impl->dtype() == c10::scalarTypeToTypeMeta(dtype_) &&
           impl->sizes() == c10::IntArrayRef(sizes_) && lies_as_slot(grad) && impl->device() == flat_.device();
  }
  bool lies_as_slot(const at::Tensor& grad) const {
    for (int64_t dim = 0; dim < grad.dim(); ++dim) {
      if (grad.size(dim) > 1 && grad.stride(dim) != strides_[dim]) return false;
    }
    return true;
  }
  // The memory of `grad`, which is ordinary, is all of the flat tensor's from here on.
  void take_memory(const at::Tensor& grad) {
    auto* flat = flat_.unsafeGetTensorImpl();
    flat->set_storage_keep_dtype(grad.storage());
    flat->set_storage_offset(grad.storage_offset());
    view_ = grad;
    storage_ = grad.storage();
    adopted_ = true;
    data_ = flat_.mutable_data_ptr();
  }

  // What a hook reads comes first: one cache line a gradient in a steady step.
  at::Tensor view_;
  void* data_ = nullptr;
  c10::Storage storage_;  // of the view, if it has one of its own
  bool adopted_ = false;  // it is that of the flat tensor too
  ViewStorage view_storage_;
  bool on_cpu_;
  at::ScalarType dtype_;
  at::ScalarType grad_dtype_;
  c10::DispatchKeySet plain_keys_;
  transport::KernelType kernel_type_;
  kernels::DType grad_kernel_dtype_;
  int64_t numel_;
  std::vector<int64_t> strides_;

  std::vector<int64_t> sizes_;
  int64_t offset_;
  at::Tensor flat_;

 private:
  bool is_intact() const { return view_.const_data_ptr() == data_; }
  bool holds_slow(const at::Tensor& grad) const {
    return numel_ != 0 && grad.layout() == at::kStrided && grad.has_storage() && grad.scalar_type() == dtype_ &&
           grad.const_data_ptr() == data_ && grad.sizes() == sizes_ && grad.strides() == strides_;
  }
  // Whether anything besides the slot refers to the view or its storage.
  bool is_held() const;
  bool part_from_holders();
  std::byte* address() const {
    return static_cast<std::byte*>(flat_.storage().mutable_data()) +
           (flat_.storage_offset() + offset_) * static_cast<int64_t>(flat_.itemsize());
  }
  // `keeps`, if given, stays alive as long as the memory is in use.
  c10::DataPtr memory(c10::DataPtr keeps = {}) const;
  at::Tensor make_view();
  c10::Storage make_own_storage() const;
  at::Tensor tensor_over(c10::Storage storage) const;
};

}  // namespace torchddp::bucket
