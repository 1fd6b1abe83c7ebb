#include "reducer/reduce/reductions.h"

namespace torchddp::reducer {

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
