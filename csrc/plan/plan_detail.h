// Shared by the files of plan/ only.
#pragma once

#include <cstdint>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>

#include "plan/bucket_plan.h"
#include "plan/param_spec.h"

namespace torchddp::plan::detail {

template <class... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream message;
  (message << ... << args);
  throw std::invalid_argument(message.str());
}

// "parameter 'layer.weight' (index 3)"
inline std::string describe(std::span<const ParamSpec> params, int64_t param) {
  return "parameter '" + params[static_cast<size_t>(param)].name + "' (index " + std::to_string(param) + ")";
}

// Every parameter in itself: sizes that are possible, and small enough in sum that no offset can overflow.
void check_params(std::span<const ParamSpec> params, int64_t alignment_bytes);

// Each index in [0, num_params) at most once; `what` names the list in the message.
void check_distinct(std::span<const int64_t> indices, int64_t num_params, const char* what);

// Offsets in a bucket are multiples of this many elements.
int64_t alignment_numel(int64_t itemsize, int64_t alignment_bytes);

// Starts a bucket of this parameter's kind, without slots.
BucketSpec make_bucket(const ParamSpec& spec);

// Adds the parameter at the next aligned offset. It must be of the bucket's kind.
void append_slot(BucketSpec& bucket, const ParamSpec& spec, int64_t param, int64_t alignment_bytes);

}  // namespace torchddp::plan::detail
