#include "plan/plan_detail.h"

#include <limits>
#include <numeric>
#include <vector>

#include "common/round_up.h"

namespace torchddp::plan::detail {

void check_params(std::span<const ParamSpec> params, int64_t alignment_bytes) {
  if (alignment_bytes <= 0 || (alignment_bytes & (alignment_bytes - 1)) != 0) {
    fail("alignment_bytes must be a power of two, got ", alignment_bytes);
  }
  int64_t total_bytes = 0;
  for (int64_t i = 0; i < std::ssize(params); ++i) {
    const ParamSpec& spec = params[static_cast<size_t>(i)];
    if (spec.numel < 0) fail(describe(params, i), ": numel must be at least 0, got ", spec.numel);
    if (spec.itemsize <= 0) fail(describe(params, i), ": itemsize must be at least 1, got ", spec.itemsize);
    int64_t bytes = 0;
    int64_t padding_bytes = 0;  // upper bound: offsets are multiples of at most alignment_bytes elements
    if (__builtin_mul_overflow(spec.numel, spec.itemsize, &bytes) ||
        __builtin_mul_overflow(alignment_bytes, spec.itemsize, &padding_bytes) ||
        __builtin_add_overflow(total_bytes, bytes, &total_bytes) ||
        __builtin_add_overflow(total_bytes, padding_bytes, &total_bytes)) {
      fail(describe(params, i), ": numel ", spec.numel, " with itemsize ", spec.itemsize, " and alignment_bytes ",
           alignment_bytes, " takes the plan past ", std::numeric_limits<int64_t>::max(), " bytes");
    }
  }
}

void check_distinct(std::span<const int64_t> indices, int64_t num_params, const char* what) {
  std::vector<bool> seen(static_cast<size_t>(num_params), false);
  for (size_t i = 0; i < indices.size(); ++i) {
    const int64_t param = indices[i];
    if (param < 0 || param >= num_params) {
      fail(what, "[", i, "] is ", param, ": allowed are parameter indices from 0 to ", num_params - 1);
    }
    if (seen[static_cast<size_t>(param)]) {
      fail(what, "[", i, "] is ", param, " for the second time: each parameter index is allowed once");
    }
    seen[static_cast<size_t>(param)] = true;
  }
}

int64_t alignment_numel(int64_t itemsize, int64_t alignment_bytes) {
  return alignment_bytes / std::gcd(itemsize, alignment_bytes);
}

BucketSpec make_bucket(const ParamSpec& spec) {
  BucketSpec bucket;
  bucket.itemsize = spec.itemsize;
  bucket.dtype = spec.dtype;
  bucket.device = spec.device;
  bucket.sparse = spec.sparse;
  bucket.owner = spec.owner;
  return bucket;
}

void append_slot(BucketSpec& bucket, const ParamSpec& spec, int64_t param, int64_t alignment_bytes) {
  const int64_t step = alignment_numel(spec.itemsize, alignment_bytes);
  const int64_t offset = bucket.sparse ? 0 : round_up(bucket.numel, step);
  bucket.slots.push_back({param, offset, spec.numel});
  if (!bucket.sparse) bucket.numel = offset + spec.numel;
}

}  // namespace torchddp::plan::detail
