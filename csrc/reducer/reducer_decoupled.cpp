// Each reduction in two halves: a reduce-scatter during backward, an all-gather after it.
//
// Note [Decoupled reductions] (DeAR, Zhang et al. 2023)
// An all-reduce is a reduce-scatter and an all-gather. Backward needs the first half only: when it ends, each rank has the averages
// of its own part of every bucket, in the bucket's shard. The second half runs while the next forward does, in the order in which
// forward comes to the parameters: the reverse of backward's. Who defers the gathers (defer_gathers) is told when they have been
// started, and waits for a bucket (wait_gather) before its gradients are read; otherwise finalize does, and a step is as without.
// What else hands gradients back (copies, unused parameters) waits for the bucket, and what concerns all of them for the last one.
// Buckets keep their memory: it is where the gathers write to.
#include "common/check.h"
#include "reducer/bucket_range.h"
#include "reducer/reducer_inl.h"

namespace torchddp::reducer {

using bucket::BucketState;
using timeline::EventKind;

void Reducer::check_decoupled() const {
  if (!config_.decoupled) {
    return;
  }
  TDDP_CHECK(!config_.wire_dtype && !owned_,
             "decoupled reductions travel as the gradients are, and give all ranks all averages");
  TDDP_CHECK(!config_.raise_non_finite,
             "with decoupled reductions backward ends before all averages are there to be looked at");
  for (const auto& spec : specs_) {
    TDDP_CHECK(
        !spec.sparse, "parameter '", spec.name,
        "' has sparse gradients: those can't be reduced in parts. Make its embedding with sparse=False, or wrap with "
        "decoupled=False.");
  }
}

// Of the transport in use: ranks may have become more or fewer.
plan::BucketLimits Reducer::limits() const {
  auto limits = config_.limits;
  if (config_.decoupled) {
    limits.solo_bytes = 0;  // which is for adopted gradients
    limits.multiple_numel = transport_->size();
  }
  return limits;
}

Reducer::Shard Reducer::make_shard(const bucket::Bucket& bucket) const {
  const auto& wire = bucket.wire();
  return {transport_->allocate(wire.numel() / transport_->size(), wire.scalar_type(), wire.device()),
          transport_->make_work()};
}

void Reducer::start_reduce_scatter(int64_t index) {
  auto& bucket = *buckets_[static_cast<size_t>(index)];
  transport_->reduce_scatter(shards_[static_cast<size_t>(index)].averages, bucket.wire(), bucket.work());
}

void Reducer::start_gathers() {
  const auto count = static_cast<int64_t>(buckets_.size());
  for (int64_t i = 0; i < count; ++i) {
    if (buckets_[static_cast<size_t>(i)]->state == BucketState::kInFlight) {
      wait_bucket(i);
    }
  }
  for (int64_t i = count - 1; i >= 0; --i) {
    auto& bucket = *buckets_[static_cast<size_t>(i)];
    auto& shard = shards_[static_cast<size_t>(i)];
    if (bucket.state != BucketState::kReduced) {
      continue;
    }
    const auto before = transport_->traffic();
    try {
      transport_->all_gather(bucket.wire(), shard.averages, *shard.gather);
    } catch (const TransportError& error) {
      fail(error, i);
    }
    stats_.current.count(transport_->traffic() - before, 0);  // gradients that were counted with the first half
    shard.under_way = true;
    ++gathers_left_;
  }
}

// What is queued for a CUDA graph, or kept in an RPC context, belongs to the step. And where ranks do the copying themselves, a
// rank that waits for a gather needs all others to wait for it too: one that waits in a barrier meanwhile would hold up both.
bool Reducer::defers_gathers() {
  return on_gathers_ != nullptr && transport_->gathers_unattended() && rpc_context_ == nullptr && !is_captured();
}

void Reducer::finish_gather(int64_t index) {
  auto& shard = shards_[static_cast<size_t>(index)];
  if (!shard.under_way) {
    return;
  }
  auto& bucket = *buckets_[static_cast<size_t>(index)];
  const BucketRange range("gather", index, bucket, specs_);
  const c10::NoGradGuard no_grad;
  const WaitScope waits(*live_, "the gather of averages", index);
  timeline_.record(EventKind::kGatherWait, index);
  try {
    shard.gather->wait(config_.timeout);
  } catch (const TransportError& error) {
    fail(error, index);
  }
  shard.under_way = false;
  --gathers_left_;
  timeline_.record(EventKind::kGatherDone, index);
  hand_back(index);
  std::erase_if(late_, [&](const Late& late) {
    const bool mine = places_[static_cast<size_t>(late.param)].bucket == &bucket;
    if (mine) {
      finish_late(late);
    }
    return mine;
  });
}

void Reducer::finish_all_gathers() {
  for (auto i = static_cast<int64_t>(shards_.size()) - 1; i >= 0; --i) {
    finish_gather(i);
  }
}

void Reducer::wait_gather(int64_t index) {
  if (gathers_left_ == 0) {
    return;
  }
  TDDP_CHECK(index >= 0 && index < static_cast<int64_t>(buckets_.size()), "there is no bucket ", index, " of ",
             buckets_.size());
  try {
    finish_gather(index);
    if (gathers_left_ == 0) {
      finish_rest();
    }
  } catch (const TransportError& error) {
    const TransportError noted(live_->with_note(error.what()));
    live_->set_error(noted.what());
    abandon_step();
    throw noted;
  } catch (const std::exception& error) {
    live_->set_error(error.what());
    abandon_step();
    throw;
  }
}

void Reducer::finish_gathers() {
  for (auto i = static_cast<int64_t>(shards_.size()) - 1; i >= 0; --i) {
    wait_gather(i);
  }
}

void Reducer::abandon_gathers() {
  for (auto& shard : shards_) {
    shard.gather->abandon();
    shard.under_way = false;
  }
  gathers_left_ = 0;
}

void Reducer::defer_gathers(std::function<void()> started) {
  TDDP_CHECK(config_.decoupled,
             "only a DistributedDataParallel that was made with decoupled=True can defer its gathers");
  finish_gathers();
  on_gathers_ = std::move(started);
}

std::vector<at::Tensor> Reducer::gradient_shards() const {
  std::vector<at::Tensor> result;
  for (const auto& shard : shards_) {
    result.push_back(shard.averages);
  }
  return result;
}

}  // namespace torchddp::reducer
