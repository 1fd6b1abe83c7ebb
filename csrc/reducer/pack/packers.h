// Packs gradients into their buckets: one by one in their hooks, or a whole bucket at once.
#pragma once

#include "reducer/graph/used_params.h"
#include "reducer/pack/hook_packer.h"
#include "reducer/pack/pack_rules.h"
#include "reducer/pack/sparse_grad.h"
#include "reducer/pack/whole_bucket_packer.h"

namespace torchddp::reducer {

class Packers {
 public:
  Packers(const Context& context, Step& step, BucketLayout& layout, NonFiniteWatch& non_finite, PackedGrads& packed,
          const UsedParams& used);

  void begin_step() {
    if (whole_) {
      whole_bucket_.begin_step();
    }
  }
  // Called in a gradient's hook, or in place of it. `incoming`: see GradSink::on_grad_ready.
  void pack(int64_t param, bool unused, const at::Tensor* incoming);
  // All gradients of the bucket have arrived; `last` is the parameter of the last one. Called under the queue's lock.
  void complete(int64_t index, int64_t last, const at::Tensor* incoming);
  // The bucket is about to be launched. Called under the queue's lock.
  void follow(int64_t index) {
    if (auto* const streams = whole_bucket_.streams(index)) {
      streams->follow();
    }
  }
  // All averages are in place, as seen by the current stream.
  void end_step() { whole_bucket_.end_step(); }

  void set_grad_dtype(std::optional<at::ScalarType> dtype) { rules_.set_grad_dtype(dtype); }
  void set_sparse_metadata(SparseMetadata metadata) { sparse_metadata_ = std::move(metadata); }

 private:
  void pack_sparse(int64_t param, const BucketLayout::Place& place, at::Tensor& grad, bool unused) const;

  const bool whole_;  // pack whole buckets
  const UsedParams& used_;
  PackRules rules_;
  HookPacker in_hook_;
  WholeBucketPacker whole_bucket_;
  std::optional<SparseMetadata> sparse_metadata_;
};

}  // namespace torchddp::reducer
