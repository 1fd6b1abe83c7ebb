#include "plan/bucket_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "common/round_up.h"

namespace torchddp::plan {
namespace {

template <class... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream message;
  (message << ... << args);
  throw std::invalid_argument(message.str());
}

// "parameter 'layer.weight' (index 3)"
std::string describe(std::span<const ParamSpec> params, int64_t param) {
  return "parameter '" + params[param].name + "' (index " + std::to_string(param) + ")";
}

// Checks each parameter on its own: valid sizes, small enough in total that no offset can overflow.
void check_params(std::span<const ParamSpec> params) {
  int64_t total_bytes = 0;
  for (int64_t i = 0; i < std::ssize(params); ++i) {
    const ParamSpec& spec = params[i];
    if (spec.numel < 0) fail(describe(params, i), ": numel must be at least 0, got ", spec.numel);
    if (spec.itemsize <= 0) fail(describe(params, i), ": itemsize must be at least 1, got ", spec.itemsize);
    if (spec.alignment < 1 || (spec.alignment > spec.itemsize && spec.alignment % spec.itemsize != 0)) {
      fail(describe(params, i), ": alignment must be at least 1 and a multiple of itemsize ", spec.itemsize,
           " where it is larger, got ", spec.alignment);
    }
    int64_t bytes = 0;
    if (__builtin_mul_overflow(spec.numel, spec.itemsize, &bytes) ||
        __builtin_add_overflow(bytes, spec.alignment - 1, &bytes) ||
        __builtin_add_overflow(total_bytes, bytes, &total_bytes)) {
      fail(describe(params, i), ": numel ", spec.numel, " with itemsize ", spec.itemsize, " takes the plan past ",
           std::numeric_limits<int64_t>::max(), " bytes");
    }
  }
}

void check_limits(const BucketLimits& limits) {
  if (limits.caps_bytes.empty()) fail("caps_bytes is empty: at least one bucket cap is needed");
  for (size_t i = 0; i < limits.caps_bytes.size(); ++i) {
    if (limits.caps_bytes[i] <= 0) {
      fail("caps_bytes[", i, "] must be at least 1 byte, got ", limits.caps_bytes[i]);
    }
  }
  if (limits.solo_bytes < 0) fail("solo_bytes must be at least 0, got ", limits.solo_bytes);
}

void check_order(std::span<const int64_t> order, int64_t num_params) {
  if (std::ssize(order) != num_params) {
    fail("order has ", order.size(), " entries for ", num_params, " parameters: each must occur exactly once");
  }
  std::vector<bool> seen(order.size(), false);
  for (size_t i = 0; i < order.size(); ++i) {
    const int64_t param = order[i];
    if (param < 0 || param >= num_params) {
      fail("order[", i, "] is ", param, ": allowed are parameter indices from 0 to ", num_params - 1);
    }
    if (seen[param]) {
      fail("order[", i, "] is ", param, " for the second time: each parameter index is allowed once");
    }
    seen[param] = true;
  }
}

// Where a parameter's slot begins if it follows `end` elements.
int64_t begin_after(int64_t end, const ParamSpec& spec) {
  return round_up(end, ceil_div(spec.alignment, spec.itemsize));
}

BucketIndices indices_of(const BucketPlan& plan) {
  BucketIndices buckets;
  for (const BucketSpec& bucket : plan.buckets) {
    std::vector<int64_t>& indices = buckets.emplace_back();
    for (const Slot& slot : bucket.slots) indices.push_back(slot.param);
  }
  return buckets;
}

// Every parameter must be in exactly one bucket.
void check_indices(const BucketIndices& buckets, std::span<const ParamSpec> params) {
  constexpr int64_t kNone = -1;
  std::vector<int64_t> bucket_of(params.size(), kNone);
  for (int64_t index = 0; index < std::ssize(buckets); ++index) {
    if (buckets[index].empty()) fail("bucket ", index, " has no slots");
    for (const int64_t param : buckets[index]) {
      if (param < 0 || param >= std::ssize(params)) {
        fail("bucket ", index, " holds parameter index ", param, ": allowed are 0 to ", std::ssize(params) - 1);
      }
      int64_t& owner = bucket_of[param];
      if (owner != kNone) fail(describe(params, param), " is in bucket ", owner, " and again in bucket ", index);
      owner = index;
    }
  }
  for (int64_t param = 0; param < std::ssize(params); ++param) {
    if (bucket_of[param] == kNone) fail(describe(params, param), " is in no bucket");
  }
}

// Parameters of one kind, or a sparse one alone.
void check_kinds(const BucketSpec& bucket, int64_t index, std::span<const ParamSpec> params) {
  for (const Slot& slot : bucket.slots) {
    const ParamSpec& spec = params[slot.param];
    const auto expect = [&](const char* what, int64_t of_param, int64_t of_bucket) {
      if (of_param == of_bucket) return;
      fail(describe(params, slot.param), " has ", what, " ", of_param, " in bucket ", index, " of ", what, " ",
           of_bucket);
    };
    expect("dtype", spec.dtype, bucket.dtype);
    expect("device", spec.device, bucket.device);
    expect("itemsize", spec.itemsize, bucket.itemsize);
    expect("sparse", spec.sparse, bucket.sparse);
    expect("owner", spec.owner, bucket.owner);
  }
  if (bucket.sparse && bucket.slots.size() != 1) {
    fail(describe(params, bucket.slots[0].param), " is sparse but shares bucket ", index, " with ",
         describe(params, bucket.slots[1].param));
  }
}

// The bucket of one (dtype, device, owner) that is still being filled.
struct OpenBucket {
  std::vector<int64_t> params;
  int64_t bytes = 0;
  size_t num_closed = 0;  // how many of its kind are already full; selects the cap
};

}  // namespace

BucketPlan make_bucket_plan(std::span<const ParamSpec> params, std::span<const int64_t> order,
                            const BucketLimits& limits) {
  check_limits(limits);
  check_params(params);
  check_order(order, std::ssize(params));

  BucketIndices buckets;
  std::map<std::tuple<int32_t, int32_t, int32_t>, OpenBucket> open_buckets;
  for (const int64_t param : order) {
    const ParamSpec& spec = params[param];
    if (spec.sparse || (limits.solo_bytes > 0 && spec.bytes() >= limits.solo_bytes)) {
      buckets.push_back({param});
      continue;
    }
    OpenBucket& open = open_buckets[{spec.dtype, spec.device, spec.owner}];
    open.params.push_back(param);
    open.bytes += spec.bytes();
    if (open.bytes >= limits.caps_bytes[std::min(open.num_closed, limits.caps_bytes.size() - 1)]) {
      buckets.push_back(std::exchange(open.params, {}));
      open.bytes = 0;
      ++open.num_closed;
    }
  }
  for (auto& [kind, open] : open_buckets) {
    if (!open.params.empty()) buckets.push_back(std::move(open.params));
  }

  std::vector<size_t> position(params.size());
  for (size_t i = 0; i < order.size(); ++i) position[order[i]] = i;
  // Within a bucket slots follow the order, so its last slot is the last to become ready.
  std::ranges::sort(buckets, {}, [&](const auto& bucket) { return position[bucket.back()]; });
  return plan_of(buckets, params);
}

BucketSpec lay_in_place(BucketSpec bucket, std::span<const ParamSpec> params, int64_t bytes) {
  bucket.numel = 0;
  for (Slot& slot : bucket.slots) {
    const ParamSpec& spec = params[slot.param];
    slot.offset = spec.bytes() >= bytes ? kInPlace : begin_after(bucket.numel, spec);
    if (slot.offset != kInPlace) bucket.numel = slot.offset + slot.numel;
  }
  return bucket;
}

BucketPlan plan_of(const BucketIndices& buckets, std::span<const ParamSpec> params) {
  check_params(params);
  check_indices(buckets, params);
  BucketPlan plan;
  for (const std::vector<int64_t>& indices : buckets) {
    const ParamSpec& first = params[indices.front()];
    BucketSpec bucket{{}, 0, first.itemsize, first.dtype, first.device, first.sparse, first.owner};
    for (const int64_t param : indices) {
      const ParamSpec& spec = params[param];
      const int64_t begin = begin_after(bucket.numel, spec);
      bucket.slots.push_back({param, begin, spec.numel});
      if (!bucket.sparse) bucket.numel = begin + spec.numel;
    }
    check_kinds(bucket, std::ssize(plan.buckets), params);
    plan.buckets.push_back(std::move(bucket));
  }
  return plan;
}

void check_plan(const BucketPlan& plan, std::span<const ParamSpec> params) {
  if (plan_of(indices_of(plan), params) != plan) fail("the plan was made for other parameters: a slot or kind differs");
}

std::vector<int64_t> complete_order(std::vector<int64_t> seen, int64_t num_params) {
  std::vector<bool> is_seen(static_cast<size_t>(num_params), false);
  for (const int64_t param : seen) is_seen[param] = true;
  for (int64_t param = num_params; param-- > 0;) {
    if (!is_seen[param]) seen.push_back(param);
  }
  return seen;
}

std::vector<int64_t> encode_plan(const BucketPlan& plan) {
  std::vector<int64_t> words;
  for (const BucketSpec& bucket : plan.buckets) {
    for (const Slot& slot : bucket.slots) words.push_back(&slot == &bucket.slots.front() ? ~slot.param : slot.param);
  }
  return words;
}

BucketPlan decode_plan(std::span<const int64_t> words, std::span<const ParamSpec> params) {
  BucketIndices buckets;
  for (const int64_t word : words) {
    if (word < 0) buckets.emplace_back();
    if (buckets.empty()) fail("encoded plan: the first word is ", word, ", expected one below 0");
    buckets.back().push_back(word < 0 ? ~word : word);
  }
  return plan_of(buckets, params);
}

}  // namespace torchddp::plan
