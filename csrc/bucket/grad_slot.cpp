#include "bucket/grad_slot.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "bucket/parallel.h"
#include "common/check.h"
#include "kernels/pack.h"
#include "kernels/sum.h"
#include "transport/scaling.h"

namespace torchddp::bucket {
namespace {

// `non_finite`, if not null, receives the number of infinities and NaNs in `src`.
void scale_cast_parallel(void* dst, kernels::DType dst_dtype, const void* src, kernels::DType src_dtype, int64_t numel,
                         double scale, int64_t* non_finite) {
  const auto found = sum_of_parts(numel, [&](int64_t begin, int64_t end) {
    auto* const to = static_cast<std::byte*>(dst) + begin * kernels::item_size(dst_dtype);
    const auto* const from = static_cast<const std::byte*>(src) + begin * kernels::item_size(src_dtype);
    if (non_finite != nullptr) {
      return kernels::scale_cast_counting(to, dst_dtype, from, src_dtype, end - begin, scale);
    }
    kernels::scale_cast(to, dst_dtype, from, src_dtype, end - begin, scale);
    return int64_t{0};
  });
  if (non_finite != nullptr) *non_finite = found;
}

// dst += src. Both are floats unless their dtypes are equal. Cast values stay in the L1 cache.
void add_parallel(void* dst, kernels::DType dst_dtype, const void* src, kernels::DType src_dtype, int64_t numel) {
  constexpr int64_t kChunk = 1024;
  sum_of_parts(numel, [&](int64_t begin, int64_t end) {
    std::array<double, kChunk> cast;
    for (; begin < end; begin += kChunk) {
      const auto count = std::min(kChunk, end - begin);
      auto* const to = static_cast<std::byte*>(dst) + begin * kernels::item_size(dst_dtype);
      const void* from = static_cast<const std::byte*>(src) + begin * kernels::item_size(src_dtype);
      if (src_dtype != dst_dtype) {
        kernels::scale_cast(cast.data(), dst_dtype, from, src_dtype, count, 1.0);
        from = cast.data();
      }
      kernels::reduce_ranks(std::array<void*, 1>{to}, std::array<const void*, 2>{to, from}, dst_dtype,
                            kernels::ReduceOp::kSum, count);
    }
    return int64_t{0};
  });
}

}  // namespace

void GradSlot::take_fresh_memory() {
  flat_.unsafeGetTensorImpl()->set_storage_keep_dtype(at::empty({numel_}, flat_.options()).storage());
  flat_.unsafeGetTensorImpl()->set_storage_offset(0);
  rebind();
}

void GradSlot::release_if_in_place() {
  if (is_in_place_) {
    release_memory();
    flat_.unsafeGetTensorImpl()->set_storage_keep_dtype(
        c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, flat_.device())));
  }
}

void GradSlot::pack_plain(const void* source, kernels::DType source_dtype, double scale, int64_t* non_finite) {
  scale_cast_parallel(data_, kernel_dtype(), source, source_dtype, numel_ * kernel_type_.words, scale, non_finite);
}

void GradSlot::add(const at::Tensor& grad) {
  if (is_plain(grad)) {
    add_parallel(data_, kernel_dtype(), grad.const_data_ptr(), grad_kernel_dtype_, numel_ * kernel_type_.words);
    return;
  }
  const c10::NoGradGuard no_grad;
  in_bucket().add_(grad);
}

void GradSlot::pack(const at::Tensor& grad, double scale) {
  if (holds(grad)) {
    scale_in_place(scale);
    return;
  }
  c10::NoGradGuard no_grad;
  TDDP_CHECK(grad.sizes() == c10::IntArrayRef(sizes_), "the gradient has shape ", grad.sizes(), ", its bucket slot ",
             c10::IntArrayRef(sizes_));
  // A gradient that overlaps this bucket's memory in another layout would be overwritten while it is read.
  const auto source = overlaps(grad) ? grad.clone() : grad;
  const auto theirs = transport::kernel_type(source.scalar_type());
  if (on_cpu_ && source.key_set() == plain_keys_ && lies_as_slot(source) && theirs.words == kernel_type_.words &&
      kernels::is_float(theirs.dtype) && kernels::is_float(kernel_dtype())) {
    pack_plain(source.const_data_ptr(), theirs.dtype, scale);
    return;
  }
  auto target = in_bucket();
  if (scale == 1.0) {
    target.copy_(source);
  } else if (source.scalar_type() == dtype_ && source.layout() == at::kStrided) {
    transport::scale_into(target, source, scale);
  } else {
    transport::scale_by(target.copy_(source), scale);
  }
}

void GradSlot::scale_in_place(double scale) {
  if (scale == 1.0) return;
  if (on_cpu_ && kernels::is_float(kernel_dtype())) {
    pack_plain(data_, kernel_dtype(), scale);
    return;
  }
  c10::NoGradGuard no_grad;
  transport::scale_by(in_bucket(), scale);
}

void GradSlot::zero() {
  if (on_cpu_) {
    std::memset(data_, 0, numel_ * flat_.itemsize());
    return;
  }
  c10::NoGradGuard no_grad;
  in_bucket().zero_();
}

void GradSlot::unpack(const at::Tensor& grad) const {
  if (is_plain(grad)) [[likely]] {
    scale_cast_parallel(grad.mutable_data_ptr(), grad_kernel_dtype_, data_, kernel_dtype(), numel_ * kernel_type_.words,
                        1.0, nullptr);
    return;
  }
  c10::NoGradGuard no_grad;
  grad.copy_(in_bucket());
}

at::Tensor GradSlot::clone() const {
  c10::NoGradGuard no_grad;
  return in_bucket().to(grad_dtype_, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Preserve);
}

std::optional<GradSlot::Piece> GradSlot::piece_of(const at::Tensor& grad) const {
  if (is_in_place_ || grad.layout() != at::kStrided || !grad.has_storage() || grad.device() != flat_.device() ||
      grad.is_conj() || grad.is_neg() || grad.sizes() != c10::IntArrayRef(sizes_) || !lies_as_slot(grad) ||
      grad.is_complex() != flat_.is_complex()) {
    return std::nullopt;
  }
  const auto theirs = transport::kernel_type(grad.scalar_type());
  if (theirs.dtype != kernel_dtype() && (!kernels::is_float(theirs.dtype) || !kernels::is_float(kernel_dtype()))) {
    return std::nullopt;
  }
  return Piece{theirs.dtype, {grad.mutable_data_ptr(), offset_ * theirs.words, numel_ * theirs.words}};
}

}  // namespace torchddp::bucket
