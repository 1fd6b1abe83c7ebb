#include "bucket/grad_slot.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>

#include "bucket/kernel_type.h"
#include "bucket/parallel.h"
#include "common/check.h"
#include "kernels/non_finite.h"

namespace torchddp::bucket {
namespace {

void scale_cast_parallel(void* dst, const void* src, kernels::DType dtype, int64_t numel, double scale) {
  for_parts(numel, [&, itemsize = kernels::item_size(dtype)](int64_t begin, int64_t end) {
    kernels::scale_cast(static_cast<std::byte*>(dst) + begin * itemsize, dtype,
                        static_cast<const std::byte*>(src) + begin * itemsize, dtype, end - begin, scale);
  });
}

int64_t scale_cast_counting_parallel(void* dst, const void* src, kernels::DType dtype, int64_t numel, double scale) {
  return sum_of_parts(numel, [&, itemsize = kernels::item_size(dtype)](int64_t begin, int64_t end) {
    return kernels::scale_cast_counting(static_cast<std::byte*>(dst) + begin * itemsize, dtype,
                                        static_cast<const std::byte*>(src) + begin * itemsize, dtype, end - begin,
                                        scale);
  });
}

// Whether more than `known` references exist. The one that the object's Python wrapper has does not count while nobody refers to the
// wrapper: it lives as long as the object, for the next who asks.
template <typename Impl>
bool has_others(const Impl* impl, size_t count, size_t known) {
  return count > known && (count > known + 1 || !impl->pyobj_slot()->has_unique_reference());
}

// What keeps the memory of a slot's view.
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

// Memory that a tensor elsewhere in the graph shares must not be scaled or reduced in place: with `param[None] + x` the other
// branch may still have to read it. Known to share it are the gradient, the tensor that autograd handed to AccumulateGrad and
// keeps until the hooks have run, and the tensor which that one is a view of (a linear layer's weight gradient is transposed).
bool is_unshared(const at::Tensor& grad, const at::Tensor* incoming) {
  if (!grad.has_storage()) {
    return false;
  }
  size_t tensors = 1;
  size_t storages = 1;
  if (incoming != nullptr) {
    if (incoming->is_same(grad)) {
      ++tensors;
    } else if (incoming->is_alias_of(grad)) {
      ++storages;
      if (incoming->is_view() && incoming->_base().use_count() == 1) {
        ++storages;
      }
    }
  }
  const auto& storage = grad.storage();
  return !has_others(grad.unsafeGetTensorImpl(), grad.use_count(), tensors) &&
         !has_others(storage.unsafeGetStorageImpl(), storage.use_count(), storages);
}

GradSlot::GradSlot(const at::Tensor& flat, int64_t offset, const at::Tensor& param, ViewStorage view_storage)
    : view_storage_(view_storage),
      numel_(param.numel()),
      dtype_(flat.scalar_type()),
      on_cpu_(flat.device().is_cpu()),
      sizes_(param.sizes().vec()),
      offset_(offset),
      flat_(flat) {
  if (param.is_non_overlapping_and_dense()) {
    strides_ = param.strides().vec();
  } else {
    strides_.resize(sizes_.size());
    int64_t stride = 1;
    for (auto dim = static_cast<int64_t>(sizes_.size()) - 1; dim >= 0; --dim) {
      strides_[dim] = stride;
      stride *= std::max<int64_t>(sizes_[dim], 1);
    }
  }
  const auto type = kernel_type(dtype_);
  kernel_dtype_ = type.dtype;
  kernel_numel_ = numel_ * type.words;
  view_ = make_view();
  plain_keys_ = view_.key_set();
  data_ = view_.mutable_data_ptr();
}

c10::DataPtr GradSlot::memory(c10::DataPtr keeps) const {
  return with_owners(address(), flat_.storage(), std::move(keeps), flat_.device());
}

at::Tensor GradSlot::in_bucket() const {
  // Below autograd on purpose: see view() in the header.
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  return flat_.as_strided(sizes_, strides_, flat_.storage_offset() + offset_);
}

at::Tensor GradSlot::make_view() {
  if (view_storage_ == ViewStorage::kBucket) {
    return in_bucket();
  }
  storage_ = make_storage(bytes(), memory());
  adopted_ = false;
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage_), flat_.key_set(), flat_.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes_, strides_);
  return view;
}

bool GradSlot::adopt(const at::Tensor& grad) {
  if (adopter_ == nullptr || !is_plain(grad) || !adopter_->reaches(grad)) {
    return false;
  }
  auto* flat = flat_.unsafeGetTensorImpl();
  flat->set_storage_keep_dtype(grad.storage());
  flat->set_storage_offset(grad.storage_offset());
  view_ = grad;
  storage_ = grad.storage();
  adopted_ = true;
  data_ = flat_.mutable_data_ptr();
  return true;
}

bool GradSlot::is_held() const {
  if (!storage_) {
    return false;
  }
  const auto* const impl = storage_.unsafeGetStorageImpl();
  // User code may have given the view another one (`grad.data = x`).
  const bool viewed = view_.defined() && view_.storage().unsafeGetStorageImpl() == impl;
  const size_t known = 1 + (viewed ? 1 : 0) + (adopted_ ? 1 : 0);
  return has_others(impl, storage_.use_count(), known) ||
         (viewed && has_others(view_.unsafeGetTensorImpl(), view_.use_count(), 1));
}

bool GradSlot::part_from_holders() {
  if (!storage_.resizable()) {
    return false;
  }
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
  // A bare pointer that somebody has (DLPack) must find memory there for as long as the gradient is kept.
  impl->set_data_ptr(with_owners(copy.mutable_data_ptr(), copy.storage(), memory(), copy.device()));
  return true;
}

bool GradSlot::follow() {
  data_ = numel_ != 0 ? address() : nullptr;
  if (!storage_) {
    return true;
  }
  if (adopted_ || !storage_.resizable()) {
    storage_ = {};
    adopted_ = false;
    view_.reset();
    return false;
  }
  auto* const impl = storage_.unsafeGetStorageImpl();
  auto before = impl->set_data_ptr(memory());
  impl->set_data_ptr(memory(std::move(before)));  // for bare pointers
  return true;
}

void GradSlot::rebind() {
  forget_view();
  data_ = address();
}

void GradSlot::let_go() {
  forget_view();
  data_ = nullptr;
}

void GradSlot::forget_view() {
  view_.reset();
  storage_ = {};
  adopted_ = false;
}

void GradSlot::restore_view() {
  if (!view_.defined() || !view_is_intact()) {
    view_ = make_view();
  }
}

bool GradSlot::holds_slow(const at::Tensor& grad) const {
  return numel_ != 0 && grad.layout() == at::kStrided && grad.has_storage() && grad.scalar_type() == dtype_ &&
         grad.const_data_ptr() == data_ && grad.sizes() == sizes_ && grad.strides() == strides_;
}

bool GradSlot::overlaps(const at::Tensor& grad) const {
  if (grad.layout() != at::kStrided || !grad.has_storage() || grad.numel() == 0) {
    return false;
  }
  const auto* const begin = static_cast<const std::byte*>(flat_.const_data_ptr());
  const auto* const data = static_cast<const std::byte*>(grad.const_data_ptr());
  return data >= begin && data < begin + flat_.nbytes();
}

bool GradSlot::is_plain(const at::Tensor& grad) const {
  const auto* impl = grad.unsafeGetTensorImpl();
  return on_cpu_ && impl->key_set() == plain_keys_ && impl->dtype() == c10::scalarTypeToTypeMeta(dtype_) &&
         impl->strides() == c10::IntArrayRef(strides_) && impl->numel() == numel_;
}

void GradSlot::pack_plain(const void* source, double scale, int64_t* non_finite) {
  if (non_finite != nullptr) {
    *non_finite = scale_cast_counting_parallel(data_, source, kernel_dtype_, kernel_numel_, scale);
    return;
  }
  scale_cast_parallel(data_, source, kernel_dtype_, kernel_numel_, scale);
}

void GradSlot::pack(const at::Tensor& grad, double scale) {
  c10::NoGradGuard no_grad;
  TDDP_CHECK(grad.sizes() == c10::IntArrayRef(sizes_), "the gradient has shape ", grad.sizes(), ", its bucket slot ",
             c10::IntArrayRef(sizes_));
  // A gradient that overlaps this bucket's memory in another layout would be overwritten while it is read.
  const auto source = overlaps(grad) ? grad.clone() : grad;
  const bool strided_cpu = on_cpu_ && source.device().is_cpu() && source.layout() == at::kStrided &&
                           source.key_set() == plain_keys_ && !source.is_complex() && !at::isComplexType(dtype_) &&
                           kernels::is_float(kernel_dtype_) && at::isFloatingType(source.scalar_type());
  if (strided_cpu && kernels::is_float(kernel_type(source.scalar_type()).dtype)) {
    kernels::scale_cast_strided(data_, kernel_dtype_, strides_, source.const_data_ptr(),
                                kernel_type(source.scalar_type()).dtype, source.strides(), source.sizes(), scale);
    return;
  }
  auto target = in_bucket();
  if (scale == 1.0) {
    target.copy_(source);
  } else if (source.scalar_type() == dtype_ && source.layout() == at::kStrided) {
    // As torch's mul by a Python number: the product is formed in float, not with a scale that was rounded to 16 bits before.
    auto factor = at::scalar_tensor(scale, at::TensorOptions().dtype(at::kDouble));
    factor.unsafeGetTensorImpl()->set_wrapped_number(true);
    at::mul_out(target, source, factor);
  } else {
    target.copy_(source).mul_(scale);
  }
}

void GradSlot::scale_in_place(double scale) {
  if (scale == 1.0) {
    return;
  }
  if (on_cpu_ && kernels::is_float(kernel_dtype_)) {
    pack_plain(data_, scale);
    return;
  }
  c10::NoGradGuard no_grad;
  in_bucket().mul_(scale);
}

void GradSlot::zero() {
  if (on_cpu_) {
    std::memset(data_, 0, static_cast<size_t>(numel_) * c10::elementSize(dtype_));
    return;
  }
  c10::NoGradGuard no_grad;
  in_bucket().zero_();
}

void GradSlot::unpack(const at::Tensor& grad) const {
  if (is_plain(grad)) [[likely]] {
    scale_cast_parallel(grad.mutable_data_ptr(), data_, kernel_dtype_, kernel_numel_, 1.0);
    return;
  }
  c10::NoGradGuard no_grad;
  grad.copy_(in_bucket());
}

// A stride means nothing where there is one element.
bool GradSlot::lies_as_slot(const at::Tensor& grad) const {
  for (int64_t dim = 0; dim < grad.dim(); ++dim) {
    if (grad.size(dim) > 1 && grad.stride(dim) != strides_[static_cast<size_t>(dim)]) {
      return false;
    }
  }
  return true;
}

std::optional<GradSlot::Piece> GradSlot::piece_of(const at::Tensor& grad) const {
  if (grad.layout() != at::kStrided || !grad.has_storage() || grad.device() != flat_.device() || grad.is_conj() ||
      grad.is_neg() || grad.sizes() != c10::IntArrayRef(sizes_) || !lies_as_slot(grad) ||
      grad.is_complex() != flat_.is_complex()) {
    return std::nullopt;
  }
  const auto theirs = kernel_type(grad.scalar_type());
  if (theirs.dtype != kernel_dtype_ && (!kernels::is_float(theirs.dtype) || !kernels::is_float(kernel_dtype_))) {
    return std::nullopt;
  }
  return Piece{grad.mutable_data_ptr(), offset_ * theirs.words, numel_ * theirs.words, theirs.dtype};
}

at::Tensor GradSlot::clone() const {
  c10::NoGradGuard no_grad;
  return in_bucket().clone(at::MemoryFormat::Preserve);
}

}  // namespace torchddp::bucket
