// The ways to pack gradients, and which one a step takes.
#pragma once

#include <memory>
#include <vector>

#include "bucket/device_pieces.h"
#include "gpu/bucket_streams.h"
#include "reducer/graph/used_params.h"
#include "reducer/pack/pack_rules.h"

namespace torchddp::reducer {

// Packs each gradient in its hook, while it is in cache; for CPUs. Called by autograd threads, each for its own parameters.
class HookPacker {
 public:
  explicit HookPacker(const PackRules& rules) : rules_(rules) {}

  // `grad`: the gradient of `param`. param.grad may be another tensor afterwards.
  void pack(int64_t param, at::Tensor& grad, bool unused, const at::Tensor* incoming) const;

 private:
  void pack_given_away(int64_t param, at::Tensor& grad, bool unused, const at::Tensor* incoming) const;
  void copy_into(int64_t param, bucket::GradSlot& slot, const at::Tensor& grad) const;
  // For a gradient that already lies in its slot.
  void scale(const BucketLayout::Place& place) const;
  // For a gradient that is not copied, checking it here would cost an extra pass, so the reduction checks it if it can.
  void look_in_place(int64_t param, const BucketLayout::Place& place, const at::Tensor& grad) const {
    if (rules_.non_finite.on() && !rules_.layout.reduction(place.index).counts_non_finite(*place.bucket)) {
      rules_.non_finite.look_at(param, grad);
    }
  }

  const PackRules& rules_;
};

// Packs a complete bucket in one launch, on the stream of its last gradient; for devices.
class WholeBucketPacker {
 public:
  explicit WholeBucketPacker(const PackRules& rules) : rules_(rules) {}

  void begin_step();
  void end_step();
  // The streams of a dense bucket on a CUDA device; null for other buckets.
  gpu::BucketStreams* streams(int64_t index) const { return streams_.empty() ? nullptr : streams_[index].get(); }

  void note_stream(int64_t param) {
    if (auto* const streams = this->streams(rules_.layout.place(param).index)) streams->note();
  }
  // Called in the hook of a gradient that is reduced in place.
  void note_gradient(int64_t param, const at::Tensor* incoming) {
    rules_.context.with_grad(param, [&](const at::Tensor& grad) {
      came_unshared_[param] = grad.defined() && bucket::is_unshared(grad, incoming) ? 1 : 0;
    });
  }

  // Called under the queue's lock. `last`: the parameter whose hook this is, and `incoming` its incoming gradient; -1 if there
  // is none.
  void pack(int64_t index, int64_t last, const at::Tensor* incoming);

 private:
  void leave_to_holders(const bucket::Bucket& bucket) const;
  void gather(int64_t param, bucket::Bucket& bucket, at::Tensor& grad, const at::Tensor* incoming,
              bucket::DevicePieces& pieces) const;
  // Handles a gradient that is reduced in place.
  void leave_in_place(int64_t param, bucket::GradSlot& slot, at::Tensor& grad, const at::Tensor* incoming,
                      bucket::DevicePieces& pieces) const;
  void look_at_all(const bucket::Bucket& bucket) const;

  const PackRules& rules_;
  std::vector<std::unique_ptr<gpu::BucketStreams>> streams_;  // by bucket
  // By parameter: whether only .grad referred to its memory in its hook. Any other holder may still be reading it on another
  // stream.
  std::vector<uint8_t> came_unshared_;
};

class Packers {
 public:
  Packers(const Context& context, Step& step, BucketLayout& layout, NonFiniteWatch& non_finite, PackedGrads& packed,
          const UsedParams& used);

  void begin_step() {
    if (whole_) whole_bucket_.begin_step();
  }
  // Called in a gradient's hook.
  void note_stream(int64_t param) {
    if (whole_) whole_bucket_.note_stream(param);
  }
  // Called in a gradient's hook, or in place of it. `incoming`: see GradSink::on_grad_ready.
  void pack(int64_t param, bool unused, const at::Tensor* incoming);
  // All gradients of the bucket have arrived; `last` is the parameter of the last one. Called under the queue's lock.
  void complete(int64_t index, int64_t last, const at::Tensor* incoming) {
    if (whole_ && !rules_.layout.bucket(index).is_sparse()) whole_bucket_.pack(index, last, incoming);
  }
  // The bucket is about to be launched. Called under the queue's lock.
  void follow(int64_t index) {
    if (auto* const streams = whole_bucket_.streams(index)) streams->follow();
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
