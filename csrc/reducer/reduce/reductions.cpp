#include "reducer/reduce/reductions.h"

namespace torchddp::reducer {

int64_t Reductions::apart_bytes() const {
  const auto& transport = context_.transport->capabilities();
  const bool pays = transport.scales_alongside || context_.config.pack_whole_buckets;
  const bool can = context_.packs_whole_buckets() && context_.keeps_apart() && !context_.owned && !hook_ &&
                   !context_.shares_gradients && transport.sums_alongside && pays;
  return can ? context_.config.adopt_bytes : 0;
}

ReductionPtr Reductions::make(const bucket::Bucket& bucket, int64_t index, int64_t count) const {
  if (hook_) {
    return make_hook_reduction(context_, hook_, events_, index, count);
  }
  if (bucket.is_sparse()) {
    return make_sparse_reduction(context_);
  }
  if (context_.owned) {
    return make_reduction_to_owner(context_, index);
  }
  return make_all_reduce(context_, non_finite_, index);
}

}  // namespace torchddp::reducer
