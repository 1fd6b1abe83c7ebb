#include "plan/bucket_plan.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "plan/plan_detail.h"

namespace torchddp::plan {
namespace {

void check_caps(const BucketLimits& limits) {
  if (limits.caps_bytes.empty()) detail::fail("caps_bytes is empty: at least one bucket cap is needed");
  for (size_t i = 0; i < limits.caps_bytes.size(); ++i) {
    if (limits.caps_bytes[i] <= 0) {
      detail::fail("caps_bytes[", i, "] must be at least 1 byte, got ", limits.caps_bytes[i]);
    }
  }
  if (limits.solo_bytes < 0) detail::fail("solo_bytes must be at least 0, got ", limits.solo_bytes);
}

void check_order(std::span<const int64_t> order, int64_t num_params) {
  if (std::ssize(order) != num_params) {
    detail::fail("order has ", order.size(), " entries for ", num_params, " parameters: each must occur exactly once");
  }
  detail::check_distinct(order, num_params, "order");
}

// The bucket of one (dtype, device, owner) that is still filling.
struct OpenBucket {
  BucketSpec spec;
  int64_t bytes = 0;       // of gradients: padding does not count, so that alignment leaves the grouping as it is
  int64_t num_closed = 0;  // how many of this kind were full before: chooses the cap
};

int64_t cap_bytes(const BucketLimits& limits, int64_t bucket_index) {
  return limits.caps_bytes[static_cast<size_t>(std::min(bucket_index, std::ssize(limits.caps_bytes) - 1))];
}

}  // namespace

BucketPlan make_bucket_plan(std::span<const ParamSpec> params, std::span<const int64_t> order,
                            const BucketLimits& limits) {
  check_caps(limits);
  detail::check_params(params, limits.alignment_bytes);
  check_order(order, std::ssize(params));

  BucketPlan plan;
  std::map<std::tuple<int32_t, int32_t, int32_t>, OpenBucket> open_buckets;
  for (const int64_t param : order) {
    const ParamSpec& spec = params[static_cast<size_t>(param)];
    if (spec.sparse || (limits.solo_bytes > 0 && spec.bytes() >= limits.solo_bytes)) {
      detail::append_slot(plan.buckets.emplace_back(detail::make_bucket(spec)), spec, param, limits.alignment_bytes);
      continue;
    }
    OpenBucket& open = open_buckets[{spec.dtype, spec.device, spec.owner}];
    if (open.spec.slots.empty()) open.spec = detail::make_bucket(spec);
    if (spec.itemsize != open.spec.itemsize) {
      detail::fail(detail::describe(params, param), ": itemsize ", spec.itemsize, " differs from the ",
                   open.spec.itemsize, " of ", detail::describe(params, open.spec.slots.front().param),
                   " of the same dtype");
    }
    detail::append_slot(open.spec, spec, param, limits.alignment_bytes);
    open.bytes += spec.bytes();
    if (open.bytes >= cap_bytes(limits, open.num_closed)) {
      plan.buckets.push_back(std::exchange(open.spec, {}));
      open.bytes = 0;
      ++open.num_closed;
    }
  }
  for (auto& [key, open] : open_buckets) {
    if (!open.spec.slots.empty()) plan.buckets.push_back(std::move(open.spec));
  }

  std::vector<int64_t> position(params.size());
  for (size_t i = 0; i < order.size(); ++i) position[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  // Within a bucket slots follow the order, so its last slot is the last to become ready.
  std::ranges::sort(plan.buckets, {},
                    [&](const BucketSpec& bucket) { return position[static_cast<size_t>(bucket.slots.back().param)]; });
  return plan;
}

std::vector<int64_t> reverse_registration_order(int64_t num_params) {
  if (num_params < 0) detail::fail("num_params must be at least 0, got ", num_params);
  std::vector<int64_t> order(static_cast<size_t>(num_params));
  for (size_t i = 0; i < order.size(); ++i) order[i] = num_params - 1 - static_cast<int64_t>(i);
  return order;
}

std::vector<int64_t> complete_order(std::span<const int64_t> seen, int64_t num_params) {
  std::vector<int64_t> order(seen.begin(), seen.end());
  const std::vector<int64_t> all = reverse_registration_order(num_params);
  detail::check_distinct(seen, num_params, "seen");
  std::vector<bool> is_seen(all.size(), false);
  for (const int64_t param : seen) is_seen[static_cast<size_t>(param)] = true;
  std::ranges::copy_if(all, std::back_inserter(order),
                       [&](int64_t param) { return !is_seen[static_cast<size_t>(param)]; });
  return order;
}

}  // namespace torchddp::plan
