#include "bucket/grad_slot.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <cstring>

#include "bucket/kernel_type.h"
#include "common/check.h"
#include "kernels/non_finite.h"

namespace torchddp::bucket {
namespace {

// Below this, waking a second thread costs more than the copy. Elements, not bytes: at::parallel_for counts those.
constexpr int64_t kParallelGrain = 256 * 1024;

void scale_cast_parallel(void* dst, const void* src, kernels::DType dtype, int64_t numel, double scale) {
  if (numel < 2 * kParallelGrain || at::get_num_threads() == 1) {
    kernels::scale_cast(dst, dtype, src, dtype, numel, scale);
    return;
  }
  const auto itemsize = kernels::item_size(dtype);
  at::parallel_for(0, numel, kParallelGrain, [&](int64_t begin, int64_t end) {
    kernels::scale_cast(static_cast<std::byte*>(dst) + begin * itemsize, dtype,
                        static_cast<const std::byte*>(src) + begin * itemsize, dtype, end - begin, scale);
  });
}

int64_t scale_cast_counting_parallel(void* dst, const void* src, kernels::DType dtype, int64_t numel, double scale) {
  if (numel < 2 * kParallelGrain || at::get_num_threads() == 1) {
    return kernels::scale_cast_counting(dst, dtype, src, dtype, numel, scale);
  }
  const auto itemsize = kernels::item_size(dtype);
  std::atomic<int64_t> count{0};
  at::parallel_for(0, numel, kParallelGrain, [&](int64_t begin, int64_t end) {
    count +=
        kernels::scale_cast_counting(static_cast<std::byte*>(dst) + begin * itemsize, dtype,
                                     static_cast<const std::byte*>(src) + begin * itemsize, dtype, end - begin, scale);
  });
  return count;
}

// Memory that a tensor elsewhere in the graph shares must not be scaled or reduced in place: with `param[None] + x` the other
// branch may still have to read it. Known to share it are the gradient, the tensor that autograd handed to AccumulateGrad and
// keeps until the hooks have run, and the tensor which that one is a view of (a linear layer's weight gradient is transposed).
bool owns_memory(const at::Tensor& grad, const at::Tensor* incoming) {
  size_t known = 1;
  if (incoming != nullptr && !incoming->is_same(grad) && incoming->is_alias_of(grad)) {
    ++known;
    if (incoming->is_view() && incoming->_base().use_count() == 1) {
      ++known;
    }
  }
  return grad.storage().use_count() <= known;
}

}  // namespace

GradSlot::GradSlot(const at::Tensor& flat, int64_t offset, const at::Tensor& param)
    : numel_(param.numel()),
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

at::Tensor GradSlot::make_view() const {
  // Below autograd on purpose: see view() in the header.
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  return flat_.as_strided(sizes_, strides_, flat_.storage_offset() + offset_);
}

bool GradSlot::adopt(const at::Tensor& grad, const at::Tensor* incoming) {
  if (adopter_ == nullptr || !is_plain(grad) || !owns_memory(grad, incoming) || !adopter_->reaches(grad)) {
    return false;
  }
  auto* flat = flat_.unsafeGetTensorImpl();
  flat->set_storage_keep_dtype(grad.storage());
  flat->set_storage_offset(grad.storage_offset());
  view_ = grad;
  data_ = flat_.mutable_data_ptr();
  return true;
}

void GradSlot::rebind() {
  view_.reset();
  data_ = static_cast<std::byte*>(flat_.mutable_data_ptr()) + offset_ * static_cast<int64_t>(c10::elementSize(dtype_));
}

void GradSlot::let_go() {
  view_.reset();
  data_ = nullptr;
}

void GradSlot::restore_view() {
  if (!view_.defined() || !view_is_intact()) {
    view_ = make_view();
  }
}

bool GradSlot::holds_slow(const at::Tensor& grad) const {
  return numel_ != 0 && grad.layout() == at::kStrided && grad.has_storage() && grad.scalar_type() == dtype_ &&
         grad.storage().data() == flat_.storage().data() && grad.const_data_ptr() == data_ && grad.sizes() == sizes_ &&
         grad.strides() == strides_;
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
  const bool overlaps = grad.layout() == at::kStrided && grad.has_storage() && grad.is_alias_of(flat_);
  const auto source = overlaps ? grad.clone() : grad;
  const bool strided_cpu = on_cpu_ && source.device().is_cpu() && source.layout() == at::kStrided &&
                           source.key_set() == plain_keys_ && !source.is_complex() && !at::isComplexType(dtype_) &&
                           !is_opaque(kernel_dtype_) && at::isFloatingType(source.scalar_type());
  if (strided_cpu && !is_opaque(kernel_type(source.scalar_type()).dtype)) {
    kernels::scale_cast_strided(data_, kernel_dtype_, strides_, source.const_data_ptr(),
                                kernel_type(source.scalar_type()).dtype, source.strides(), source.sizes(), scale);
    return;
  }
  auto target = make_view();
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
  if (on_cpu_ && !is_opaque(kernel_dtype_)) {
    pack_plain(data_, scale);
    return;
  }
  c10::NoGradGuard no_grad;
  make_view().mul_(scale);
}

void GradSlot::zero() {
  if (on_cpu_) {
    std::memset(data_, 0, static_cast<size_t>(numel_) * c10::elementSize(dtype_));
    return;
  }
  c10::NoGradGuard no_grad;
  make_view().zero_();
}

void GradSlot::unpack(const at::Tensor& grad) const {
  if (is_plain(grad)) [[likely]] {
    scale_cast_parallel(grad.mutable_data_ptr(), data_, kernel_dtype_, kernel_numel_, 1.0);
    return;
  }
  c10::NoGradGuard no_grad;
  grad.copy_(make_view());
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
  if (theirs.dtype != kernel_dtype_ && (is_opaque(theirs.dtype) || is_opaque(kernel_dtype_))) {
    return std::nullopt;
  }
  return Piece{grad.mutable_data_ptr(), offset_ * theirs.words, numel_ * theirs.words, theirs.dtype};
}

at::Tensor GradSlot::clone() const {
  c10::NoGradGuard no_grad;
  return make_view().clone(at::MemoryFormat::Preserve);
}

}  // namespace torchddp::bucket
