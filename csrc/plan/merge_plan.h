// Bucket plans with the least exposed time, from measured ready times and the cost of a message (MG-WFBP: Shi, Chu and Li,
// INFOCOM 2019).
#pragma once

#include <span>

#include "plan/bucket_plan.h"

namespace torchddp::plan {

// What one bucket of n bytes takes on the one channel that all buckets share: alpha_s + n * beta_s_per_byte, and, if more than
// one gradient lies in it, n * pack_s_per_byte: a gradient alone in its bucket need not be copied.
struct MessageCost {
  double alpha_s = 0;
  double beta_s_per_byte = 0;
  double pack_s_per_byte = 0;

  double seconds(int64_t bytes, bool packed) const {
    return alpha_s + static_cast<double>(bytes) * (beta_s_per_byte + (packed ? pack_s_per_byte : 0));
  }
};

// The plan whose last bucket is reduced the earliest, among those that cut `order` into runs of consecutive gradients (a run
// becomes one bucket per dtype and device in it): exact, by dynamic programming over the cuts, O(n^2) at worst. Then
// neighbouring runs are merged as long as that costs at most `slack_s` in the end: fewer messages for the same time.
// `ready_s`: by parameter, seconds since backward began; along `order` a time below one before it counts as that one.
// Throws std::invalid_argument with what was got and what is allowed (times or costs negative or not finite; an order
// that is no permutation).
BucketPlan make_merged_plan(std::span<const ParamSpec> params, std::span<const int64_t> order,
                            std::span<const double> ready_s, const MessageCost& cost, int64_t alignment_bytes,
                            double slack_s = 0);

// When the last bucket of `plan` is reduced, in seconds since backward began: buckets go in turn, each when its last
// gradient is there and the one before it is through.
double predict_finish_s(const BucketPlan& plan, std::span<const ParamSpec> params, std::span<const double> ready_s,
                        const MessageCost& cost);

}  // namespace torchddp::plan
