// The end of a step: wait for each bucket, and hand the averages back where gradients are no views.
#include "common/check.h"
#include "reducer/bucket_range.h"
#include "reducer/messages.h"
#include "reducer/reducer_inl.h"
#include "transport/c10d/group_work.h"

namespace torchddp::reducer {

using bucket::BucketState;
using timeline::EventKind;

void Reducer::finalize() {
  armed_.store(false, std::memory_order_release);
  transport_->end_backward();
  stats_.current.backward_compute_end_ns = wall_clock_ns();
  const c10::NoGradGuard no_grad;
  for (int64_t i = 0; i < static_cast<int64_t>(buckets_.size()); ++i) {
    if (buckets_[static_cast<size_t>(i)]->state == BucketState::kInFlight) {
      wait_bucket(i);
      hand_back(i);
    }
  }
  stats_.current.comm_end_ns = wall_clock_ns();
  for (const auto& late : late_) {
    finish_late(late);
  }
  late_.clear();
  finish_averages();
  finish_used_map();
  if (futures_) {
    for (const auto index : c10::irange(futures_->size())) {
      c10::intrusive_ptr<c10::ivalue::Future> future = futures_->get(index);
      const WaitScope waits(*live_, "what was queued after backward");
      try {
        wait_for_future(*future, "its future");
      } catch (const TransportError& error) {
        throw TransportError(c10::str("rank ", transport_->rank(), ", step ", stats_.steps,
                                      ": what was queued after backward (", index + 1, " of ", futures_->size(),
                                      ") failed: ", error.what()));
      }
      future->wait();
      if (future->hasError()) {
        std::rethrow_exception(future->exception_ptr());
      }
    }
    futures_.reset();
  }
  if (!has_rebuilt_ && measured_order_.empty() && live_->num_ready.load(std::memory_order_relaxed) > 0) {
    measured_order_ = plan::complete_order(grad_ready_order(), static_cast<int64_t>(params_.size()));
  }
  forward_work_.reset();
  rpc_context_.reset();
  incomplete_.store(false, std::memory_order_release);
  timeline_.record(EventKind::kBackwardEnd, stats_.steps);
  stats_.finish_step();
  live_->end_step();
  if (non_finite_ != nullptr) {
    non_finite_->publish();
    raise_non_finite();
  }
}

// The averages are in the bucket.
void Reducer::hand_back(int64_t index) {
  if (gradient_stats_.defined()) {
    buckets_[static_cast<size_t>(index)]->measure(gradient_stats_[index]);  // while it is in cache
  }
  look_at_average(index);
  finish_bucket(index);
}

const at::Tensor& Reducer::gradient_stats() const {
  TDDP_CHECK(config_.gradient_stats,
             "gradients are only measured by a DistributedDataParallel that was made with gradient_stats=True");
  return gradient_stats_;
}

void Reducer::finish_used_map() {
  if (used_map_ == nullptr) {
    return;
  }
  const WaitScope waits(*live_, kWaitsForUsedMap);
  try {
    used_map_->finish_reduction(config_.timeout);
  } catch (const TransportError& error) {
    throw TransportError(c10::str("rank ", transport_->rank(), ", step ", stats_.steps,
                                  ": finding out which parameters other ranks used failed: ", error.what()));
  }
  if (dynamic_find_unused()) {
    used_map_->reset();
  }
}

// Of somebody else, who may never complete it.
void Reducer::wait_for_future(c10::ivalue::Future& future, const char* what) {
  const auto& interruption = transport_->interruption();
  if (future.completed()) {
    interruption.check();
    return;
  }
  const bool own_limit = config_.timeout != transport::kTransportTimeout;
  const auto limit = own_limit ? config_.timeout : transport::timeout_of(*group_, params_.front().device());
  if (!transport::wait_or_keep(group_, [&] { return interruption.wait_for(future, limit); })) {
    throw TransportError(c10::str(what, " was not completed within ", limit.count(), " ms, the timeout of ",
                                  own_limit ? "this DistributedDataParallel" : "the process group"));
  }
}

void Reducer::wait_bucket(int64_t index) {
  auto& bucket = *buckets_[static_cast<size_t>(index)];
  const BucketRange range("wait", index, bucket, specs_);
  const WaitScope waits(*live_, "the reduction", index);
  timeline_.record(EventKind::kWaitBegin, index);
  if (comm_hook_) {
    const auto future = std::exchange(bucket.future, nullptr);
    TDDP_CHECK(future != nullptr, "the communication hook returned no future for bucket ", index, " on rank ",
               transport_->rank(), ": it must return a torch.futures.Future that holds one tensor");
    at::Tensor result;
    try {
      wait_for_future(*future, "the communication hook's future");
      result = comm_hook_.wait(*future);
    } catch (const TransportError& error) {
      fail(error, index);
    }
    if (bucket.is_sparse()) {
      sparse_[static_cast<size_t>(index)].finish(bucket, result);
    } else {
      const auto& flat = bucket.wire();
      TDDP_CHECK(result.numel() == flat.numel(), "the communication hook returned ", result.numel(),
                 " elements for bucket ", index, " on rank ", transport_->rank(), ", which has ", flat.numel(),
                 " (parameters ", list_names(bucket.params(), specs_), ")");
      if (!result.is_alias_of(flat)) {
        flat.copy_(result.view_as(flat));
      }
    }
  } else {
    try {
      bucket.work().wait(config_.timeout);
    } catch (const TransportError& error) {
      fail(error, index);
    }
    collect_in_flight(bucket);
  }
  finish_owned(bucket);
  bucket.state = BucketState::kReduced;
  timeline_.record(EventKind::kDone, index);
}

void Reducer::finish_bucket(int64_t index) {
  auto& bucket = *buckets_[static_cast<size_t>(index)];
  if (gives_away(bucket)) {
    let_go(bucket);
    return;
  }
  if (bucket.is_sparse() || optimizer_in_backward_ || views_) {
    return;
  }
  bucket::Scatter scatter;
  auto* const together = packs_whole_buckets() ? &scatter : nullptr;
  for (const auto param : bucket.params()) {
    with_grad(param, [&](at::Tensor& grad) { finish_grad(param, grad, together); });
  }
  scatter.run();
}

bool Reducer::keeps_grad(int64_t param) {
  if (used_map_ == nullptr || used_map_->used_here(param)) {
    return false;
  }
  if (used_map_->is_known()) {
    return !used_map_->used_anywhere(param, config_.timeout);
  }
  const WaitScope waits(*live_, kWaitsForUsedMap);
  return !used_map_->used_anywhere(param, config_.timeout);
}

void Reducer::finish_grad(int64_t param, at::Tensor& grad, bucket::Scatter* scatter) {
  auto& slot = *places_[static_cast<size_t>(param)].slot;
  if (keeps_grad(param)) {
    return;
  }
  if (!grad.defined()) {
    slot.restore_view();
    grad = views_ && rpc_context_ == nullptr ? slot.view() : slot.clone();
  } else if (!slot.holds(grad)) {
    const auto target = grad.detach();  // of a gradient that is part of a graph (create_graph), only the values change
    scatter != nullptr ? scatter->add(slot, target) : slot.unpack(target);
  }
}

void Reducer::finish_late(const Late& late) {
  const auto& place = places_[static_cast<size_t>(late.param)];
  const bool sparse = place.slot == nullptr;
  const bool skipped = place.bucket->state == BucketState::kSkipped;
  if (optimizer_in_backward_ && !skipped) {
    return;
  }
  with_grad(late.param, [&](at::Tensor& grad) {
    if (!skipped && !keeps_grad(late.param)) {
      if (!sparse) {
        finish_grad(late.param, grad, nullptr);
      }
    } else if (sparse) {
      grad = late.saved;
    } else if (late.saved.defined()) {
      grad.copy_(late.saved);
    }
  });
}

}  // namespace torchddp::reducer
