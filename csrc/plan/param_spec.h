// What a bucket plan needs to know of a parameter. Pure data: no torch types.
#pragma once

#include <cstdint>
#include <string>

namespace torchddp::plan {

struct ParamSpec {
  std::string name;      // fully qualified, for messages
  int64_t numel = 0;     // elements of the gradient
  int64_t itemsize = 0;  // bytes of one element
  int32_t dtype = 0;     // opaque key: only parameters with equal dtype share a bucket
  int32_t device = 0;    // opaque key: only parameters with equal device share a bucket
  bool sparse = false;   // its gradient is sparse: a bucket of its own, without flat memory
  int32_t owner =
      -1;  // the rank that alone gets the average; only parameters with equal owner share a bucket. -1: all ranks

  int64_t bytes() const { return numel * itemsize; }
};

}  // namespace torchddp::plan
