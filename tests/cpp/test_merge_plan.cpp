// The planner: known small cases, every error, and brute force over all ways to cut random models.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>

#include "check.h"
#include "plan/merge_plan.h"

namespace torchddp::plan {
namespace {

using Longs = std::vector<int64_t>;
using Doubles = std::vector<double>;
using Error = std::invalid_argument;

std::vector<ParamSpec> floats(const Longs& numels) {
  std::vector<ParamSpec> params;
  for (const int64_t numel : numels) {
    std::string name = "p";
    params.push_back({name.append(std::to_string(params.size())), numel, 4, 0, 0, false});
  }
  return params;
}

Longs forward_order(size_t count) {
  Longs order(count);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

std::vector<Longs> groups(const BucketPlan& plan) {
  std::vector<Longs> result;
  for (const BucketSpec& bucket : plan.buckets) {
    Longs& group = result.emplace_back();
    for (const Slot& slot : bucket.slots) group.push_back(slot.param);
  }
  return result;
}

BucketPlan planned(const std::vector<ParamSpec>& params, const Doubles& ready_s, const MessageCost& cost,
                   double slack_s = 0) {
  return make_merged_plan(params, forward_order(params.size()), ready_s, cost, 1, slack_s);
}

TEST(a_dear_message_takes_everything) {
  const auto params = floats({1, 1, 1});
  CHECK(groups(planned(params, {0, 1, 2}, {10, 0, 0})) == std::vector<Longs>({{0, 1, 2}}));
}

TEST(free_messages_leave_only_the_last_gradient_for_the_end) {
  // 4 bytes take 1 s each: the first two are through before the third is there.
  const auto params = floats({1, 1, 1});
  const MessageCost cost{0, 0.25, 0};
  const auto plan = planned(params, {0, 5, 10}, cost);
  CHECK_EQ(predict_finish_s(plan, params, Doubles{0, 5, 10}, cost), 11.0);
  CHECK(groups(plan) == std::vector<Longs>({{0, 1}, {2}}));  // two messages do what three would
}

TEST(copying_keeps_a_large_gradient_alone) {
  const auto params = floats({1000, 1000});
  CHECK(groups(planned(params, {0, 0}, {1, 0.001, 0})) == std::vector<Longs>({{0, 1}}));
  CHECK(groups(planned(params, {0, 0}, {1, 0.001, 0.01})) == std::vector<Longs>({{0}, {1}}));
}

TEST(dtypes_and_sparse_gradients_do_not_mix) {
  auto params = floats({1, 1, 1, 1, 1});
  params[1].dtype = params[3].dtype = 1;
  params[4].sparse = true;
  const auto plan = planned(params, {0, 1, 2, 3, 4}, {100, 1, 0});
  CHECK(groups(plan) == std::vector<Longs>({{0, 2}, {1, 3}, {4}}));
  check_plan(plan, params, 1);
}

TEST(slack_buys_fewer_messages) {
  const auto params = floats({1, 1, 1});
  const MessageCost cost{0, 0.25, 0};
  CHECK_EQ(planned(params, {0, 5, 10}, cost, 2.0).buckets.size(), 1u);
  CHECK_EQ(planned(params, {0, 5, 10}, cost, 1.5).buckets.size(), 2u);
}

TEST(an_order_is_followed_and_times_may_go_back_a_little) {
  const auto params = floats({1, 1, 1});
  const auto plan = make_merged_plan(params, Longs{2, 0, 1}, Doubles{0.9, 10, 1}, {0, 0.25, 0}, 1);
  CHECK(groups(plan) == std::vector<Longs>({{2, 0}, {1}}));
}

TEST(no_parameters_no_buckets) { CHECK(planned({}, {}, {1, 1, 0}).buckets.empty()); }

TEST(bad_input_is_named) {
  const auto params = floats({1, 1});
  CHECK_THROWS(Error, (make_merged_plan(params, Longs{0}, Doubles{0, 0}, {}, 1)), "1 entries for 2 parameters");
  CHECK_THROWS(Error, (make_merged_plan(params, Longs{0, 0}, Doubles{0, 0}, {}, 1)), "second time");
  CHECK_THROWS(Error, (planned(params, {0}, {})), "ready_s has 1 entries for 2");
  CHECK_THROWS(Error, (planned(params, {0, -1}, {})), "ready_s[1]");
  CHECK_THROWS(Error, (planned(params, {0, 1}, {-1, 0, 0})), "alpha_s");
  CHECK_THROWS(Error, (planned(params, {0, 1}, {0, 1.0 / 0.0, 0})), "beta_s_per_byte");
  CHECK_THROWS(Error, (planned(params, {0, 1}, {0, 0, -1})), "pack_s_per_byte");
  CHECK_THROWS(Error, (planned(params, {0, 1}, {}, -1)), "slack_s");
}

// Every way to cut the order, run by run, with the buckets that a run becomes.
double brute_force_s(const std::vector<ParamSpec>& params, const Doubles& ready_s, const MessageCost& cost) {
  const size_t count = params.size();
  double best_s = std::numeric_limits<double>::infinity();
  for (uint32_t cuts = 0; cuts < (1u << (count - 1)); ++cuts) {
    BucketPlan plan;
    size_t begin = 0;
    for (size_t end = 1; end <= count; ++end) {
      if (end < count && (cuts >> (end - 1) & 1) == 0) continue;
      std::vector<std::pair<size_t, BucketSpec>> run;
      for (size_t i = begin; i < end; ++i) {
        const auto same = std::ranges::find_if(run, [&](const auto& entry) {
          return entry.second.dtype == params[i].dtype && !entry.second.sparse && !params[i].sparse;
        });
        auto& entry = same == run.end() ? run.emplace_back() : *same;
        entry.first = i;
        entry.second.dtype = params[i].dtype;
        entry.second.sparse = params[i].sparse;
        entry.second.slots.push_back({static_cast<int64_t>(i), 0, params[i].numel});
      }
      std::ranges::sort(run, {}, [](const auto& entry) { return entry.first; });
      for (auto& entry : run) plan.buckets.push_back(entry.second);
      begin = end;
    }
    best_s = std::min(best_s, predict_finish_s(plan, params, ready_s, cost));
  }
  return best_s;
}

TEST(brute_force_finds_nothing_better) {
  std::mt19937 random(7);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % static_cast<uint64_t>(limit)); };
  for (int round = 0; round < 400; ++round) {
    const auto count = static_cast<size_t>(1 + below(10));
    Longs numels;
    Doubles ready_s;
    double now_s = 0;
    for (size_t i = 0; i < count; ++i) {
      numels.push_back(below(5) == 0 ? 0 : below(1000));
      ready_s.push_back(now_s += static_cast<double>(below(4) == 0 ? 0 : below(1000)) * 1e-3);
    }
    auto params = floats(numels);
    if (round % 3 == 0) {
      for (auto& spec : params) spec.dtype = static_cast<int32_t>(below(2));
    }
    if (round % 4 == 0) params.back().sparse = true;
    const MessageCost cost{static_cast<double>(below(500)) * 1e-3, static_cast<double>(below(1000)) * 1e-6,
                           static_cast<double>(round % 2 == 0 ? 0 : below(500)) * 1e-6};
    const auto plan = planned(params, ready_s, cost);
    check_plan(plan, params, 1);
    const double best_s = brute_force_s(params, ready_s, cost);
    CHECK(std::abs(predict_finish_s(plan, params, ready_s, cost) - best_s) <= 1e-9 * best_s);
  }
}

TEST(ten_thousand_parameters_are_planned_at_once) {
  std::mt19937 random(3);
  Longs numels;
  Doubles ready_s;
  for (int i = 0; i < 10'000; ++i) {
    numels.push_back(1 + static_cast<int64_t>(random() % 100'000));
    ready_s.push_back(i * 1e-5);
  }
  const auto params = floats(numels);
  // From a link that hides everything to one on which every run is tried.
  for (const double beta : {1e-12, 1e-10, 1e-9, 1e-7}) {
    const MessageCost cost{3e-4, beta, 0};
    const auto plan = planned(params, ready_s, cost);
    check_plan(plan, params, 1);
    const auto in_one =
        planned(params, Doubles(ready_s.size(), ready_s.back()), cost);  // all ready at once: one message
    CHECK_EQ(in_one.buckets.size(), 1u);
    CHECK(predict_finish_s(plan, params, ready_s, cost) <= predict_finish_s(in_one, params, ready_s, cost));
  }
}

}  // namespace
}  // namespace torchddp::plan
