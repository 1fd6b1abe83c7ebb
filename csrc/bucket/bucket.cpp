#include "bucket/bucket.h"

#include <ATen/Functions.h>
#include <ATen/ops/_foreach_zero.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>

#include "bucket/tensor_checks.h"
#include "kernels/sum.h"

namespace torchddp::bucket {
namespace {

constexpr int64_t kMeasuredAtOnce = 4 * 1024 * 1024;  // elements, by operators: they take 32 MiB for a part's doubles

void measure_flat(const at::Tensor& flat, const at::Tensor& stats) {
  if (flat.is_cpu()) {
    auto* const out = stats.mutable_data_ptr<double>();
    out[0] += sum_of_squares(flat);
    out[1] += static_cast<double>(count_non_finite(flat));
    return;
  }
  for (int64_t begin = 0; begin < flat.numel(); begin += kMeasuredAtOnce) {
    const auto part = flat.narrow(0, begin, std::min(kMeasuredAtOnce, flat.numel() - begin));
    stats[0].add_(at::linalg_vector_norm(part, 2, std::nullopt, false, at::kDouble).square().to(stats.device()));
    stats[1].add_(part.isfinite().logical_not().sum().to(stats.device()));
  }
}

bool may_follow(BucketState from, BucketState to) {
  switch (to) {
    case BucketState::kIdle: return true;
    case BucketState::kFilling:  // a forward may have had no backward
      return from != BucketState::kReady && from != BucketState::kInFlight;
    case BucketState::kReady: return from == BucketState::kFilling;
    case BucketState::kInFlight:
    case BucketState::kSkipped: return from == BucketState::kReady;
    case BucketState::kReduced: return from == BucketState::kInFlight;
  }
  return false;
}

}  // namespace

const char* name_of(BucketState state) {
  constexpr std::array<const char*, 6> kNames = {"idle", "filling", "ready", "in flight", "skipped", "reduced"};
  return kNames.at(static_cast<size_t>(state));
}

Bucket::Bucket(const plan::BucketSpec& spec, std::span<const at::Tensor> params, transport::Transport& transport,
               const GradStorage& storage)
    : grad_storage_(storage), owner_(spec.owner), given_away_(owner_ >= 0 && owner_ != transport.rank()),
      sparse_(spec.sparse) {
  TDDP_INTERNAL(!spec.slots.empty(), "a bucket plan has an empty bucket");
  for (const auto& slot : spec.slots) {
    params_.push_back(slot.param);
    offsets_.push_back(slot.offset);
  }
  if (sparse_) return;
  const auto device = params[params_.front()].device();
  // NCCL registers memory only if all ranks have the same, and owners of different buckets don't.
  flat_ = given_away_ || (owner_ >= 0 && transport.capabilities().reaches_any_memory)
              ? at::empty({spec.numel}, at::TensorOptions().dtype(storage.dtype).device(device))
              : transport.allocate(spec.numel, storage.dtype, device);
  make_wire();
  slots_.reserve(spec.slots.size());
  for (const auto& slot : spec.slots) {
    const auto& param = params[slot.param];
    if (slot.offset == plan::kInPlace) {
      in_place_.push_back(at::empty({slot.numel}, flat_.options()));
      slots_.emplace_back(in_place_.back(), 0, param, storage).lie_in_place(transport);
    } else {
      slots_.emplace_back(flat_, slot.offset, param, storage);
    }
  }
  if (given_away_) {
    release_memory();
  } else {
    find_padding();
    clear_padding();
  }
  if (slots_.size() == 1 && flat_.is_cpu() && !flat_.is_complex()) {
    if (storage.may_adopt) slots_[0].allow_adoption(transport);
    scales_ = transport.capabilities().scales && kernels::can_scale(slots_[0].kernel_dtype());
  }
}

void Bucket::make_wire() {
  if (!flat_.is_complex()) {
    wire_ = flat_;
    return;
  }
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  wire_ = at::view_as_real(flat_).view({-1});
}

void Bucket::find_padding() {
  padding_.clear();
  int64_t end = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].is_in_place()) {
      if (offsets_[i] > end) padding_.push_back(flat_.narrow(0, end, offsets_[i] - end));
      end = offsets_[i] + slots_[i].numel();
    }
  }
}

void Bucket::clear_padding() {
  if (!padding_.empty()) {
    const c10::NoGradGuard no_grad;
    at::_foreach_zero_(padding_);
  }
}

void Bucket::advance(BucketState to) {
  const auto from = state_.exchange(to, std::memory_order_acq_rel);
  TDDP_INTERNAL(may_follow(from, to), "the bucket of parameter ", params_.front(), " went from ", name_of(from), " to ",
                name_of(to));
}

void Bucket::take_memory(const at::Tensor& memory) {
  TDDP_INTERNAL(static_cast<int64_t>(memory.nbytes()) >= bytes(), "a bucket was given too little memory");
  point_at(memory);
  make_wire();
  for (auto& slot : slots_) slot.rebind();
  find_padding();
  clear_padding();
}

void Bucket::move(transport::Transport& transport) {
  const c10::NoGradGuard no_grad;
  const auto memory = flat_.is_cpu() ? transport.allocate(flat_.numel(), flat_.scalar_type(), flat_.device())
                                     : at::empty({flat_.numel()}, flat_.options());
  if (flat_.storage().nbytes() != 0) memory.copy_(flat_);  // the program may have freed it
  point_at(memory);
  make_wire();
  find_padding();
  for (auto& slot : slots_) {
    if (!slot.is_in_place()) slot.follow();
  }
}

void Bucket::release_memory() {
  padding_.clear();  // it would keep the memory alive
  point_at(at::empty({0}, flat_.options()));
  if (flat_.is_complex()) wire_.reset();
  for (auto& slot : slots_) slot.release_memory();
}

void Bucket::measure(const at::Tensor& stats) const {
  const c10::NoGradGuard no_grad;
  stats.zero_();
  if (sparse_ || !wire_.is_floating_point()) return;
  measure_flat(wire_, stats);
  for (const auto& gradient : in_place_) measure_flat(gradient, stats);
}

}  // namespace torchddp::bucket
