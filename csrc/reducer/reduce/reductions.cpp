#include "reducer/reduce/reductions.h"

#include "reducer/reduce/all_reduce.h"
#include "reducer/reduce/hook.h"
#include "reducer/reduce/sparse.h"
#include "reducer/reduce/to_owner.h"

namespace torchddp::reducer {

std::unique_ptr<Reduction> Reductions::make(const bucket::Bucket& bucket, int64_t index, int64_t count) const {
  if (hook_) {
    return std::make_unique<HookReduction>(context_, hook_, events_, index, count);
  }
  if (bucket.is_sparse()) {
    return std::make_unique<SparseReduction>(context_);
  }
  if (context_.owned) {
    return std::make_unique<ToOwner>(context_, index);
  }
  return std::make_unique<AllReduce>(context_, non_finite_, index);
}

}  // namespace torchddp::reducer
