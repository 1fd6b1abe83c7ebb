#include "bucket/slot_view.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/strides.h>

#include <utility>

namespace torchddp::bucket {
namespace {

// Whether there are more than `known` references. The reference held by the object's Python wrapper does not count while no one
// refers to the wrapper, which lives as long as the object.
template <typename Impl>
bool has_others(const Impl* impl, size_t count, size_t known) {
  return count > known && (count > known + 1 || !impl->pyobj_slot()->has_unique_reference());
}

// Keeps the memory of a slot's view alive.
struct MemoryOwners {
  c10::Storage flat;
  c10::DataPtr more;
};

c10::DataPtr with_owners(void* data, c10::Storage flat, c10::DataPtr more, c10::Device device) {
  auto owners = std::make_unique<MemoryOwners>(MemoryOwners{std::move(flat), std::move(more)});
  return {data, owners.release(), [](void* context) { delete static_cast<MemoryOwners*>(context); }, device};
}

c10::Storage make_storage(size_t bytes, c10::DataPtr data) {
  auto* const allocator = c10::GetAllocator(data.device().type());
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), allocator,
                                               /*resizable=*/true);
}

}  // namespace

// Memory shared with a tensor elsewhere in the graph must not be scaled or reduced in place: with `param[None] + x` the other
// branch may still have to read it. The known sharers are the gradient itself, the tensor that autograd handed to
// AccumulateGrad and keeps until the hooks have run, and the tensor that this one is a view of (a linear layer's weight
// gradient is transposed).
bool is_unshared(const at::Tensor& grad, const at::Tensor* incoming) {
  if (!grad.has_storage()) return false;
  size_t tensors = 1;
  size_t storages = 1;
  if (incoming != nullptr) {
    if (incoming->is_same(grad)) {
      ++tensors;
    } else if (incoming->is_alias_of(grad)) {
      ++storages;
      if (incoming->is_view() && incoming->_base().use_count() == 1) ++storages;
    }
  }
  const auto& storage = grad.storage();
  return !has_others(grad.unsafeGetTensorImpl(), grad.use_count(), tensors) &&
         !has_others(storage.unsafeGetStorageImpl(), storage.use_count(), storages);
}

SlotView::SlotView(const at::Tensor& flat, int64_t offset, const at::Tensor& param, const GradStorage& storage)
    : view_storage_(storage.view_storage), on_cpu_(flat.device().is_cpu()), dtype_(storage.dtype),
      grad_dtype_(storage.grad_dtype), kernel_type_(transport::kernel_type(dtype_)),
      grad_kernel_dtype_(transport::kernel_type(grad_dtype_).dtype), numel_(param.numel()), sizes_(param.sizes().vec()),
      offset_(offset), flat_(flat) {
  const auto row_major = c10::contiguous_strides(sizes_);
  strides_ = (param.is_non_overlapping_and_dense() ? param.strides() : c10::IntArrayRef(row_major)).vec();
  view_ = make_view();
  plain_keys_ = view_.key_set();
  data_ = view_.mutable_data_ptr();
}

c10::DataPtr SlotView::memory(c10::DataPtr keeps) const {
  return with_owners(address(), flat_.storage(), std::move(keeps), flat_.device());
}

at::Tensor SlotView::in_bucket() const {
  // Below autograd on purpose: see view() in the header.
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  return flat_.as_strided(sizes_, strides_, flat_.storage_offset() + offset_);
}

at::Tensor SlotView::make_view() {
  if (view_storage_ == ViewStorage::kBucket) return in_bucket();
  storage_ = make_own_storage();
  adopted_ = false;
  return tensor_over(storage_);
}

c10::Storage SlotView::make_own_storage() const {
  return make_storage(static_cast<size_t>(numel_) * flat_.itemsize(), memory());
}

at::Tensor SlotView::tensor_over(c10::Storage storage) const {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), flat_.key_set(), flat_.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes_, strides_);
  return tensor;
}

void SlotView::show_as(at::Tensor& shown) const {
  if (shown.defined()) {
    shown.unsafeGetTensorImpl()->set_storage_keep_dtype(make_own_storage());
  } else {
    shown = tensor_over(make_own_storage());
  }
}

bool SlotView::is_held() const {
  if (!storage_) return false;
  const auto* const impl = storage_.unsafeGetStorageImpl();
  // User code may have given the view another one (`grad.data = x`).
  const bool viewed = view_.defined() && view_.storage().unsafeGetStorageImpl() == impl;
  const size_t known = 1 + (viewed ? 1 : 0) + (adopted_ ? 1 : 0);
  return has_others(impl, storage_.use_count(), known) ||
         (viewed && has_others(view_.unsafeGetTensorImpl(), view_.use_count(), 1));
}

bool SlotView::part_from_holders() {
  if (!storage_.resizable()) return false;
  const c10::NoGradGuard no_grad;
  const auto kept = std::exchange(storage_, c10::Storage());
  view_.reset();
  auto* const impl = kept.unsafeGetStorageImpl();
  const auto bytes = impl->nbytes();
  const auto as_bytes = flat_.options().dtype(at::kByte);
  const auto copy = at::empty({static_cast<int64_t>(bytes)}, as_bytes);
  copy.copy_(at::from_blob(impl->mutable_data(), copy.sizes(), as_bytes));
  if (std::exchange(adopted_, false)) {
    auto memory = impl->set_data_ptr({nullptr, copy.device()});
    flat_.unsafeGetTensorImpl()->set_storage_keep_dtype(make_storage(bytes, std::move(memory)));
  }
  // A bare pointer held elsewhere (DLPack) must stay valid for as long as the gradient is kept.
  impl->set_data_ptr(with_owners(copy.mutable_data_ptr(), copy.storage(), memory(), copy.device()));
  return true;
}

void SlotView::follow() {
  if (storage_ && (adopted_ || !storage_.resizable())) {
    rebind();
    return;
  }
  data_ = numel_ != 0 ? address() : nullptr;
  if (storage_) {
    auto* const impl = storage_.unsafeGetStorageImpl();
    auto before = impl->set_data_ptr(memory());
    impl->set_data_ptr(memory(std::move(before)));  // for bare pointers
  }
}

}  // namespace torchddp::bucket
