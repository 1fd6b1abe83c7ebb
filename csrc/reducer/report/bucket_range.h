// A named torch.profiler range around work on one bucket.
#pragma once

#include <ATen/record_function.h>

#include <span>

#include "bucket/bucket.h"
#include "reducer/report/messages.h"

namespace torchddp::reducer {

// "torchddp.launch bucket 3 (4194304 bytes: 'head.weight', 'norm.bias' and 7 more)". Takes nanoseconds while no profiler runs.
class BucketRange {
 public:
  BucketRange(const char* what, int64_t index, const bucket::Bucket& bucket, std::span<const plan::ParamSpec> specs)
      : guard_(at::RecordScope::USER_SCOPE) {
    if (guard_.isActive()) [[unlikely]] {
      guard_.before(c10::str("torchddp.", what, " bucket ", index, " (", bucket.bytes(),
                             " bytes: ", list_names(bucket.params(), specs, 2), ")"));
    }
  }

 private:
  at::RecordFunction guard_;
};

}  // namespace torchddp::reducer
