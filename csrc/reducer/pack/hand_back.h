// Moves averages from their buckets to where the program expects them.
#pragma once

#include "bucket/device_pieces.h"
#include "reducer/base/step.h"
#include "reducer/graph/used_params.h"
#include "reducer/pack/packed_grads.h"
#include "reducer/reduce/layout.h"

namespace torchddp::reducer {

class HandBack {
 public:
  HandBack(const Context& context, BucketLayout& layout, PackedGrads& packed, UsedParams& used)
      : context_(context), layout_(layout), packed_(packed), used_(used) {}

  // The averages are in the bucket. A bucket owned by another rank releases its memory.
  void run(bucket::Bucket& bucket);
  // All averages are in their buckets.
  void finish(const LateGrad& late);

 private:
  bucket::DevicePieces pieces_to_move() const;
  void hand_back(int64_t param, at::Tensor& grad, bucket::DevicePieces& pieces);

  const Context& context_;
  BucketLayout& layout_;
  PackedGrads& packed_;
  UsedParams& used_;
};

}  // namespace torchddp::reducer
