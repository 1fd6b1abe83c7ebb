// What .grad gets at the end of a step.
#pragma once

#include <span>
#include <vector>

#include "bucket/device_pieces.h"
#include "reducer/base/grad_marks.h"
#include "reducer/base/step.h"
#include "reducer/graph/used_params.h"
#include "reducer/pack/pack_rules.h"
#include "reducer/reduce/layout.h"

namespace torchddp::reducer {

// Note [Averages that one rank has]
// After a synchronized backward the owner's .grad holds an average and the other ranks have none. A second backward without
// zero_grad() must not average that value again, because it exists on one rank only. So before autograd adds to such a
// gradient, the hook sets the average aside, and it is added to the next average. Under no_sync() there is no next average yet,
// and a zero_grad() in between could not reach the value set aside; that is an error. An average of zeros stays where it is,
// and a tensor that the program has put in its place is this rank's share of the next average, as anywhere.
//
// Does nothing unless buckets have owners.
class OwnAverages {
 public:
  OwnAverages(const Context& context, const Step& step, const BucketLayout& layout, UsedParams& used, GradMarks& marks);

  // Called when autograd or the reducer is about to add to a gradient.
  void before_accumulation(int64_t param) {
    if (context_.owned) put_aside(param);
  }
  // Clears what an abandoned step left behind.
  void begin_step() { kept_.assign(kept_.size(), at::Tensor()); }
  // The averages of this step are now in .grad.
  void finish();

  // Takes over from a previous reducer. `places`: each parameter's index there, or kNotThere.
  void take_over(const OwnAverages& before, std::span<const int64_t> places) {
    for (size_t i = 0; i < reduced_.size(); ++i) {
      reduced_[i] = places[i] == kNotThere ? 0 : before.reduced_[places[i]];
    }
  }

 private:
  void put_aside(int64_t param);

  const Context& context_;
  const Step& step_;
  const BucketLayout& layout_;
  UsedParams& used_;
  GradMarks& marks_;
  std::vector<uint8_t> reduced_;  // by parameter: whether its gradient is such an average
  std::vector<at::Tensor> kept_;  // the averages set aside while a backward adds to them
};

// Moves averages from their buckets to where the program expects them.
class HandBack {
 public:
  HandBack(const Context& context, BucketLayout& layout, PackedGrads& packed, UsedParams& used)
      : context_(context), layout_(layout), packed_(packed), used_(used) {}

  // The averages are in the bucket. A bucket owned by another rank releases its memory.
  void run(bucket::Bucket& bucket);
  // All averages are in their buckets.
  void finish(const LateGrad& late);

 private:
  bucket::DevicePieces pieces_to_move() const {
    return bucket::DevicePieces(bucket::DevicePieces::Direction::kUnpack, 1.0, context_.packs_whole_buckets());
  }
  void hand_back(int64_t param, at::Tensor& grad, bucket::DevicePieces& pieces);

  const Context& context_;
  BucketLayout& layout_;
  PackedGrads& packed_;
  UsedParams& used_;
};

}  // namespace torchddp::reducer
