// Packs a bucket in one launch when it is complete, on the stream of its last gradient: on devices.
#pragma once

#include <mutex>
#include <vector>

#include "bucket/device_pieces.h"
#include "gpu/stream_set.h"
#include "reducer/pack/pack_rules.h"

namespace torchddp::reducer {

// The streams of each bucket's gradients; see Note [Streams and lifetimes] in gpu/stream_set.h.
class WholeBucketPacker {
 public:
  explicit WholeBucketPacker(const PackRules& rules);
  ~WholeBucketPacker();
  WholeBucketPacker(const WholeBucketPacker&) = delete;
  WholeBucketPacker& operator=(const WholeBucketPacker&) = delete;

  void begin_step();
  // Called in the hook of a gradient of the bucket: torch's current stream is the one that produced it.
  void note_stream(int64_t bucket);

  // Under the queue's lock. `last`: the parameter whose hook it is, and `incoming` what came there; -1 where there is none.
  void pack(int64_t index, int64_t last, const at::Tensor* incoming);
  // Before a bucket is launched: that may be in the hook of an earlier one, on another stream than the one that packed it.
  void follow(int64_t index);

 private:
  struct Streams {
    gpu::StreamSet producers;
    gpu::Stream packed_on = nullptr;
  };

  void leave_to_holders(const bucket::Bucket& bucket) const;
  void gather(int64_t param, bucket::Bucket& bucket, at::Tensor& grad, const at::Tensor* incoming,
              bucket::DevicePieces& pieces) const;
  void look_at_all(const bucket::Bucket& bucket) const;

  const PackRules& rules_;
  gpu::Device* const device_;
  gpu::Event fork_ = nullptr;     // used under the queue's lock
  std::mutex mutex_;              // of producers
  std::vector<Streams> streams_;  // by bucket
};

}  // namespace torchddp::reducer
