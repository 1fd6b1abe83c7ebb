// Packs a complete bucket in one launch, on the stream of its last gradient. Used on devices.
#pragma once

#include <memory>
#include <vector>

#include "bucket/device_pieces.h"
#include "gpu/bucket_streams.h"
#include "reducer/pack/pack_rules.h"

namespace torchddp::reducer {

class WholeBucketPacker {
 public:
  explicit WholeBucketPacker(const PackRules& rules) : rules_(rules) {}

  void begin_step();
  void end_step();
  // The streams of a dense bucket on a CUDA device; null for other buckets.
  gpu::BucketStreams* streams(int64_t index) const {
    return streams_.empty() ? nullptr : streams_[static_cast<size_t>(index)].get();
  }

  // Called in the hook of a gradient that is reduced where it lies.
  void note_gradient(int64_t param, const at::Tensor* incoming);

  // Called under the queue's lock. `last`: the parameter whose hook this is, and `incoming` its incoming gradient; -1 if there
  // is none.
  void pack(int64_t index, int64_t last, const at::Tensor* incoming);

 private:
  void leave_to_holders(const bucket::Bucket& bucket) const;
  void gather(int64_t param, bucket::Bucket& bucket, at::Tensor& grad, const at::Tensor* incoming,
              bucket::DevicePieces& pieces) const;
  // Handles a gradient that is reduced where it lies.
  void place_apart(int64_t param, bucket::GradSlot& slot, at::Tensor& grad, const at::Tensor* incoming) const;
  void look_at_all(const bucket::Bucket& bucket) const;

  const PackRules& rules_;
  std::vector<std::unique_ptr<gpu::BucketStreams>> streams_;  // by bucket
  // By parameter: whether only .grad referred to its memory in its hook. Any other holder may still be reading it on another
  // stream.
  std::vector<uint8_t> came_unshared_;
};

}  // namespace torchddp::reducer
