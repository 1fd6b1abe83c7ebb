#include "bucket/bucket.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "bucket/device_pieces.h"
#include "bucket/kernel_type.h"
#include "common/check.h"
#include "kernels/stats.h"

namespace torchddp::bucket {

Bucket::Bucket(const plan::BucketSpec& spec, std::span<const at::Tensor> params, transport::Transport& transport)
    : work_(transport.make_work()), sparse_(spec.sparse) {
  TDDP_INTERNAL(!spec.slots.empty(), "a bucket plan has an empty bucket");
  for (const auto& slot : spec.slots) {
    params_.push_back(slot.param);
    offsets_.push_back(slot.offset);
  }
  if (sparse_) {
    return;
  }
  const auto& first = params[static_cast<size_t>(params_.front())];
  flat_ = transport.allocate(spec.numel, first.scalar_type(), first.device());
  wire_ = flat_;
  if (flat_.is_complex()) {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    wire_ = at::view_as_real(flat_).view({-1});
  }
  if (spec.numel != [&] {
        int64_t sum = 0;
        for (const auto& s : spec.slots) sum += s.numel;
        return sum;
      }()) {
    flat_.zero_();  // padding between slots is summed too: keep it finite
  }
  slots_.reserve(spec.slots.size());
  for (const auto& slot : spec.slots) {
    slots_.emplace_back(flat_, slot.offset, params[static_cast<size_t>(slot.param)]);
  }
  if (slots_.size() == 1 && slots_[0].numel() == spec.numel && slots_[0].on_cpu() && !flat_.is_complex()) {
    slots_[0].allow_adoption(transport);
    scales_ = transport.scales(flat_.scalar_type());
  }
}

void Bucket::measure(const at::Tensor& stats) const {
  const c10::NoGradGuard no_grad;
  if (sparse_ || !wire_.is_floating_point()) {
    stats.zero_();
  } else if (wire_.device().is_cpu()) {
    const auto found = kernels::measure(wire_.const_data_ptr(), kernel_type(wire_.scalar_type()).dtype, wire_.numel());
    auto* const out = stats.mutable_data_ptr<double>();
    out[0] = found.sum_squares;
    out[1] = static_cast<double>(found.non_finite);
  } else if (DevicePieces::available(wire_.device())) {
    DevicePieces::measure(wire_, stats);
  } else {
    const auto wide = wire_.to(at::kDouble);
    stats.copy_(at::stack({wide.square().sum(), wide.isfinite().logical_not().sum().to(at::kDouble)}));
  }
}

int64_t Bucket::bytes() const { return sparse_ ? 0 : static_cast<int64_t>(flat_.nbytes()); }

}  // namespace torchddp::bucket
