#include "plan/merge_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "plan/plan_detail.h"

namespace torchddp::plan {
namespace {

void check_time(double value, const char* what) {
  if (!std::isfinite(value) || value < 0) detail::fail(what, " must be finite and at least 0, got ", value);
}

void check_cost(const MessageCost& cost) {
  check_time(cost.alpha_s, "alpha_s");
  check_time(cost.beta_s_per_byte, "beta_s_per_byte");
  check_time(cost.pack_s_per_byte, "pack_s_per_byte");
}

void check_ready(std::span<const double> ready_s, size_t num_params) {
  if (ready_s.size() != num_params) {
    detail::fail("ready_s has ", ready_s.size(), " entries for ", num_params, " parameters");
  }
  for (size_t i = 0; i < ready_s.size(); ++i) {
    if (!std::isfinite(ready_s[i]) || ready_s[i] < 0) {
      detail::fail("ready_s[", i, "] must be finite and at least 0, got ", ready_s[i]);
    }
  }
}

struct Gradient {
  double ready_s = 0;  // never less than the gradient's before it
  int64_t bytes = 0;
  size_t kind = 0;  // gradients of one kind share a bucket
};

// In the order of readiness; sparse gradients are each of a kind of their own.
std::vector<Gradient> line_up(std::span<const ParamSpec> params, std::span<const int64_t> order,
                              std::span<const double> ready_s) {
  std::vector<Gradient> line;
  line.reserve(order.size());
  std::map<std::tuple<int32_t, int32_t, int32_t, int64_t>, size_t> kinds;
  double latest_s = 0;
  for (const int64_t param : order) {
    const ParamSpec& spec = params[static_cast<size_t>(param)];
    latest_s = std::max(latest_s, ready_s[static_cast<size_t>(param)]);
    const size_t kind =
        kinds.try_emplace({spec.dtype, spec.device, spec.owner, spec.sparse ? param + 1 : 0}, kinds.size())
            .first->second;
    line.push_back({latest_s, spec.bytes(), kind});
  }
  return line;
}

// A run of consecutive gradients that grows at its front, as the buckets it would become.
class Run {
 public:
  explicit Run(size_t num_kinds) : place_(num_kinds, kNone) {}

  void clear() {
    for (const Part& part : parts_) place_[part.kind] = kNone;
    parts_.clear();
  }

  void push_front(const Gradient& gradient) {
    size_t& place = place_[gradient.kind];
    if (place == kNone) {
      place = parts_.size();
      parts_.push_back({gradient.ready_s, gradient.bytes, 1, gradient.kind});
    } else {
      parts_[place].bytes += gradient.bytes;
      ++parts_[place].count;
    }
  }

  // When the first of its buckets could start, if nothing was before it.
  double first_ready_s() const { return parts_.back().ready_s; }

  // When its last bucket is through, if the channel is free from `free_s` on.
  double finish_s(double free_s, const MessageCost& cost) const {
    for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {  // launched in the order of their last gradients
      free_s = std::max(free_s, part->ready_s) + cost.seconds(part->bytes, part->count > 1);
    }
    return free_s;
  }

 private:
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();
  struct Part {
    double ready_s;
    int64_t bytes;
    int64_t count;
    size_t kind;
  };
  std::vector<Part> parts_;    // the last to be launched first
  std::vector<size_t> place_;  // by kind
};

size_t count_kinds(std::span<const Gradient> line) {
  size_t count = 0;
  for (const Gradient& gradient : line) count = std::max(count, gradient.kind + 1);
  return count;
}

// The best last run among the first `end` gradients, given when the channel is free after any number of them.
struct Best {
  double finish_s = std::numeric_limits<double>::infinity();
  size_t begin = 0;

  void offer(double this_s, size_t this_begin) {
    if (this_s <= finish_s) {  // of equals the longest run
      finish_s = this_s;
      begin = this_begin;
    }
  }
};

Best best_run(std::span<const Gradient> line, size_t end, std::span<const double> free_s, const MessageCost& cost,
              Run& run) {
  run.clear();
  Best best;
  for (size_t begin = end; begin-- > 0;) {
    run.push_front(line[begin]);
    best.offer(run.finish_s(free_s[begin], cost), begin);
    // With the channel free before the run can use it, a longer run only has more to send.
    if (free_s[begin] <= run.first_ready_s()) break;
  }
  return best;
}

// The same where all gradients are of one kind, which is the common case and several times faster.
Best best_run_of_one_kind(std::span<const Gradient> line, size_t end, std::span<const double> free_s,
                          const MessageCost& cost) {
  const double ready_s = line[end - 1].ready_s;
  int64_t bytes = 0;
  Best best;
  for (size_t begin = end; begin-- > 0;) {
    bytes += line[begin].bytes;
    best.offer(std::max(free_s[begin], ready_s) + cost.seconds(bytes, end - begin > 1), begin);
    if (free_s[begin] <= ready_s) break;
  }
  return best;
}

// The ends (exclusive) of the runs with the least finish.
std::vector<size_t> best_cuts(std::span<const Gradient> line, const MessageCost& cost) {
  std::vector<double> free_s(line.size() + 1, 0);  // after the first j gradients
  std::vector<size_t> start(line.size() + 1, 0);   // of the last run among the first j
  const size_t num_kinds = count_kinds(line);
  Run run(num_kinds);
  for (size_t end = 1; end <= line.size(); ++end) {
    const Best best =
        num_kinds == 1 ? best_run_of_one_kind(line, end, free_s, cost) : best_run(line, end, free_s, cost, run);
    free_s[end] = best.finish_s;
    start[end] = best.begin;
  }
  std::vector<size_t> cuts;
  for (size_t end = line.size(); end > 0; end = start[end]) cuts.push_back(end);
  std::ranges::reverse(cuts);
  return cuts;
}

// The latest time at which the channel may be free for the last run, the last two, ..: all of them are through by `finish_s`.
class Deadlines {
 public:
  Deadlines(std::span<const Gradient> line, std::span<const size_t> cuts, const MessageCost& cost, double finish_s)
      : latest_s_(cuts.size() + 1, finish_s) {
    Run run(count_kinds(line));
    for (size_t i = cuts.size(); i-- > 0;) {
      run.clear();
      for (size_t k = cuts[i]; k-- > (i == 0 ? 0 : cuts[i - 1]);) run.push_front(line[k]);
      latest_s_[i] = latest_start_s(run, cost, latest_s_[i + 1]);
    }
  }

  double before(size_t run) const { return latest_s_[run]; }

 private:
  // finish_s() is constant up to some time and then grows with it: by bisection, as a run may be several buckets.
  static double latest_start_s(const Run& run, const MessageCost& cost, double finish_s) {
    if (run.finish_s(0, cost) > finish_s) return 0;
    double low = 0;
    double high = finish_s;
    for (int i = 0; i < 60; ++i) {
      const double middle = (low + high) / 2;
      (run.finish_s(middle, cost) <= finish_s ? low : high) = middle;
    }
    return low;
  }

  std::vector<double> latest_s_;
};

std::vector<size_t> merge_for_free(std::span<const Gradient> line, std::span<const size_t> cuts,
                                   const MessageCost& cost, double finish_s) {
  const Deadlines deadlines(line, cuts, cost, finish_s);
  Run run(count_kinds(line));
  std::vector<size_t> kept;
  double free_s = 0;
  size_t begin = 0;
  const auto finish_of = [&](size_t end) {
    run.clear();
    for (size_t k = end; k-- > begin;) run.push_front(line[k]);
    return run.finish_s(free_s, cost);
  };
  for (size_t i = 0; i < cuts.size(); ++i) {
    if (i + 1 < cuts.size() && finish_of(cuts[i + 1]) <= deadlines.before(i + 2)) continue;
    free_s = finish_of(cuts[i]);
    begin = cuts[i];
    kept.push_back(cuts[i]);
  }
  return kept;
}

std::vector<BucketSpec> buckets_of(std::span<const int64_t> run, std::span<const ParamSpec> params,
                                   int64_t alignment_bytes) {
  std::vector<std::pair<size_t, BucketSpec>> found;  // with the place of the last gradient
  std::map<std::tuple<int32_t, int32_t, int32_t>, size_t> open;
  for (size_t i = 0; i < run.size(); ++i) {
    const ParamSpec& spec = params[static_cast<size_t>(run[i])];
    size_t index = found.size();
    if (!spec.sparse) index = open.try_emplace({spec.dtype, spec.device, spec.owner}, index).first->second;
    if (index == found.size()) found.emplace_back(i, detail::make_bucket(spec));
    found[index].first = i;
    detail::append_slot(found[index].second, spec, run[i], alignment_bytes);
  }
  std::ranges::sort(found, {}, &std::pair<size_t, BucketSpec>::first);
  std::vector<BucketSpec> buckets;
  for (auto& [last, bucket] : found) buckets.push_back(std::move(bucket));
  return buckets;
}

}  // namespace

BucketPlan make_merged_plan(std::span<const ParamSpec> params, std::span<const int64_t> order,
                            std::span<const double> ready_s, const MessageCost& cost, int64_t alignment_bytes,
                            double slack_s) {
  detail::check_params(params, alignment_bytes);
  if (order.size() != params.size()) {
    detail::fail("order has ", order.size(), " entries for ", params.size(),
                 " parameters: each must occur exactly once");
  }
  detail::check_distinct(order, std::ssize(params), "order");
  check_ready(ready_s, params.size());
  check_cost(cost);
  check_time(slack_s, "slack_s");

  const std::vector<Gradient> line = line_up(params, order, ready_s);
  std::vector<size_t> cuts = best_cuts(line, cost);
  const auto plan_of = [&](std::span<const size_t> ends) {
    BucketPlan plan;
    size_t begin = 0;
    for (const size_t end : ends) {
      std::ranges::move(buckets_of(order.subspan(begin, end - begin), params, alignment_bytes),
                        std::back_inserter(plan.buckets));
      begin = end;
    }
    return plan;
  };
  std::vector<double> sorted_s(params.size());
  for (size_t i = 0; i < order.size(); ++i) sorted_s[static_cast<size_t>(order[i])] = line[i].ready_s;
  const double finish_s = predict_finish_s(plan_of(cuts), params, sorted_s, cost);
  // A hair more than the optimum, which rounding must not turn into a miss.
  return plan_of(merge_for_free(line, cuts, cost, finish_s * (1 + 1e-12) + slack_s));
}

double predict_finish_s(const BucketPlan& plan, std::span<const ParamSpec> params, std::span<const double> ready_s,
                        const MessageCost& cost) {
  check_ready(ready_s, params.size());
  check_cost(cost);
  double free_s = 0;
  for (const BucketSpec& bucket : plan.buckets) {
    double bucket_ready_s = 0;
    int64_t bytes = 0;
    for (const Slot& slot : bucket.slots) {
      bucket_ready_s = std::max(bucket_ready_s, ready_s[static_cast<size_t>(slot.param)]);
      bytes += params[static_cast<size_t>(slot.param)].bytes();
    }
    free_s = std::max(free_s, bucket_ready_s) + cost.seconds(bytes, bucket.slots.size() > 1);
  }
  return free_s;
}

}  // namespace torchddp::plan
