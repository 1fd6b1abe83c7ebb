// Bucket plans: small cases, all error messages, and properties over seeded random models.
#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>

#include "check.h"
#include "plan/bucket_plan.h"

namespace torchddp::plan {
namespace {

using Longs = std::vector<int64_t>;
using Error = std::invalid_argument;

// Appends: GCC 12 warns about "p" + std::to_string(i) (GCC bug 105651).
std::string numbered(std::string name, int64_t number) { return name.append(std::to_string(number)); }

ParamSpec spec(std::string name, int64_t numel, int64_t itemsize = 4, int32_t dtype = 6, int32_t device = 0,
               bool sparse = false) {
  return {std::move(name), numel, itemsize, dtype, device, sparse};
}

std::vector<ParamSpec> four_params() { return {spec("a", 10), spec("b", 20), spec("c", 30), spec("d", 40)}; }

using Groups = std::vector<Longs>;

// Values of each bucket.
Groups params_of(const BucketPlan& plan) {
  Groups params;
  for (const BucketSpec& bucket : plan.buckets) {
    params.emplace_back();
    for (const Slot& slot : bucket.slots) params.back().push_back(slot.param);
  }
  return params;
}

Longs offsets_of(const BucketSpec& bucket) {
  Longs offsets;
  for (const Slot& slot : bucket.slots) offsets.push_back(slot.offset);
  return offsets;
}

TEST(plan_closes_a_bucket_when_its_cap_is_reached) {
  const auto params = four_params();
  // d = 160 bytes; c = 120; b + a = 120. d alone reaches the cap of 160, then c + b do, and a is left.
  const BucketPlan plan = make_bucket_plan(params, reverse_registration_order(4), {{160}});
  CHECK(params_of(plan) == (Groups{{3}, {2, 1}, {0}}));
  CHECK(offsets_of(plan.buckets.at(1)) == (Longs{0, 30}));
  CHECK_EQ(plan.buckets.at(1).numel, 50);
  CHECK_EQ(plan.buckets.at(1).itemsize, 4);
  CHECK_EQ(plan.buckets.at(1).dtype, 6);
  // With one byte more, d alone is not enough.
  CHECK(params_of(make_bucket_plan(params, reverse_registration_order(4), {{161}})) == (Groups{{3, 2}, {1, 0}}));
}

TEST(plan_takes_one_cap_after_the_other_and_repeats_the_last) {
  const std::vector<ParamSpec> params(7, spec("p", 1));
  const BucketPlan plan = make_bucket_plan(params, Longs{0, 1, 2, 3, 4, 5, 6}, {{4, 12, 8}});
  CHECK(params_of(plan) == (Groups{{0}, {1, 2, 3}, {4, 5}, {6}}));
}

TEST(plan_counts_caps_for_each_dtype_and_device) {
  std::vector<ParamSpec> params;
  for (int i = 0; i < 4; ++i) {
    params.push_back(spec(numbered("f32.", i), 1));
    params.push_back(spec(numbered("bf16.", i), 2, 2, 15));
    params.push_back(spec(numbered("cuda.", i), 1, 4, 6, 1));
  }
  Longs order(params.size());
  std::iota(order.begin(), order.end(), 0);
  const BucketPlan plan = make_bucket_plan(params, order, {{4, 100}});
  // The first bucket of each kind holds one parameter, the second the other three.
  CHECK(params_of(plan) == (Groups{{0}, {1}, {2}, {3, 6, 9}, {4, 7, 10}, {5, 8, 11}}));
  CHECK_EQ(plan.buckets.at(4).dtype, 15);
  CHECK_EQ(plan.buckets.at(5).device, 1);
}

TEST(plan_never_mixes_owners) {
  std::vector<ParamSpec> params;
  for (int i = 0; i < 6; ++i) {
    params.push_back(spec(numbered("p", i), 4));
    params.back().owner = i % 3;
  }
  BucketPlan plan = make_bucket_plan(params, reverse_registration_order(6), {{1000}});
  CHECK(params_of(plan) == (Groups{{5, 2}, {4, 1}, {3, 0}}));
  for (const size_t i : {0, 1, 2}) CHECK_EQ(plan.buckets[i].owner, static_cast<int32_t>(2 - i));
  plan.buckets[1].owner = 7;
  CHECK_THROWS(std::invalid_argument, check_plan(plan, params), "made for other parameters");
}

TEST(plan_sorts_buckets_by_their_last_gradient) {
  // The bf16 bucket opens first and closes last.
  const std::vector<ParamSpec> params = {spec("h0", 1, 2, 15), spec("f0", 4), spec("f1", 4), spec("h1", 1, 2, 15)};
  const BucketPlan plan = make_bucket_plan(params, Longs{0, 1, 2, 3}, {{16}});
  CHECK(params_of(plan) == (Groups{{1}, {2}, {0, 3}}));
}

TEST(plan_gives_sparse_parameters_a_bucket_without_memory) {
  std::vector<ParamSpec> params = four_params();
  params[2].sparse = true;
  const BucketPlan plan = make_bucket_plan(params, reverse_registration_order(4), {{1 << 20}});
  CHECK(params_of(plan) == (Groups{{2}, {3, 1, 0}}));
  CHECK(plan.buckets.at(0).sparse && !plan.buckets.at(1).sparse);
  CHECK_EQ(plan.buckets.at(0).numel, 0);
  CHECK_EQ(plan.buckets.at(0).slots[0].numel, 30);
}

TEST(slots_begin_where_their_alignment_puts_them) {
  std::vector<ParamSpec> params(4, spec("p", 3));
  for (ParamSpec& param : params) param.alignment = 32;
  params[2].numel = 16;
  const BucketPlan plan = plan_of({{0, 1, 2, 3}}, params);
  CHECK(offsets_of(plan.buckets.at(0)) == (Longs{0, 8, 16, 32}));
  CHECK_EQ(plan.buckets.at(0).numel, 35);  // no padding after the last
  check_plan(plan, params);
  CHECK(decode_plan(encode_plan(plan), params) == plan);
  // An alignment smaller than an element has no effect.
  for (ParamSpec& param : params) param.alignment = 3;
  CHECK(offsets_of(plan_of({{0, 1, 2, 3}}, params).buckets.at(0)) == (Longs{0, 3, 6, 22}));
  CHECK_THROWS(Error, check_plan(plan, params), "made for other parameters");
  for (ParamSpec& param : params) param.sparse = true;
  CHECK_EQ(plan_of({{0}, {1}, {2}, {3}}, params).buckets.at(1).numel, 0);
}

TEST(padding_does_not_fill_a_bucket) {
  std::vector<ParamSpec> params(3, spec("p", 1));
  for (ParamSpec& param : params) param.alignment = 128;
  const BucketPlan plan = make_bucket_plan(params, Longs{0, 1, 2}, {{8}});
  CHECK(params_of(plan) == (Groups{{0, 1}, {2}}));
  CHECK_EQ(plan.buckets.at(0).numel, 33);
}

TEST(alignments_are_numbers_of_elements) {
  const auto with = [](int64_t alignment) {
    std::vector<ParamSpec> params(1, spec("p", 3));
    params[0].alignment = alignment;
    return params;
  };
  CHECK_THROWS(Error, plan_of({{0}}, with(0)), "parameter 'p' (index 0): alignment must be at least 1", "got 0");
  CHECK_THROWS(Error, plan_of({{0}}, with(6)), "a multiple of itemsize 4 where it is larger, got 6");
  CHECK_THROWS(Error, plan_of({{0}, {1}}, std::vector<ParamSpec>(2, with(int64_t{1} << 62)[0])), "takes the plan past");
}

TEST(plan_of_takes_buckets_as_they_are) {
  const auto params = four_params();
  const BucketPlan plan = plan_of({{2, 0}, {1}, {3}}, params);
  CHECK(params_of(plan) == (Groups{{2, 0}, {1}, {3}}));
  CHECK(offsets_of(plan.buckets.at(0)) == (Longs{0, 30}));
  CHECK(plan_of({{3}, {2, 1}, {0}}, params) == make_bucket_plan(params, reverse_registration_order(4), {{160}}));
  CHECK_THROWS(Error, plan_of({{3}, {2, 1}}, params), "parameter 'a' (index 0) is in no bucket");
  CHECK_THROWS(Error, plan_of({{3}, {2, 1}, {0, 3}}, params),
               "parameter 'd' (index 3) is in bucket 0 and again in bucket 2");
  CHECK_THROWS(Error, plan_of({{3}, {2, 1}, {0, 4}}, params), "bucket 2 holds parameter index 4", "0 to 3");
  CHECK_THROWS(Error, plan_of({{3}, {}, {2, 1, 0}}, params), "bucket 1 has no slots");
}

TEST(plan_of_nothing_and_of_empty_parameters) {
  const std::vector<ParamSpec> none;
  CHECK(make_bucket_plan(none, Longs{}, {{1}}).buckets.empty());
  CHECK(decode_plan(encode_plan({}), none) == BucketPlan{});
  const std::vector<ParamSpec> empty = {spec("e", 0), spec("f", 0)};
  const BucketPlan plan = make_bucket_plan(empty, Longs{1, 0}, {{1}});
  CHECK_EQ(plan.buckets.size(), 1u);
  CHECK_EQ(plan.buckets.at(0).numel, 0);
  check_plan(plan, empty);
}

TEST(orders) {
  CHECK(reverse_registration_order(4) == (Longs{3, 2, 1, 0}));
  CHECK(reverse_registration_order(0).empty());
  CHECK(complete_order(Longs{}, 3) == (Longs{2, 1, 0}));
  CHECK(complete_order(Longs{1, 4}, 5) == (Longs{1, 4, 3, 2, 0}));
  CHECK(complete_order(Longs{0, 1, 2}, 3) == (Longs{0, 1, 2}));
}

TEST(make_bucket_plan_says_what_is_wrong) {
  const auto params = four_params();
  const Longs order = {0, 1, 2, 3};
  const auto with = [&](size_t index, ParamSpec changed) {
    auto copy = params;
    copy[index] = std::move(changed);
    return copy;
  };
  CHECK_THROWS(Error, make_bucket_plan(params, order, {{}}), "caps_bytes is empty");
  CHECK_THROWS(Error, make_bucket_plan(params, order, {{5, 0}}), "caps_bytes[1] must be at least 1 byte, got 0");
  CHECK_THROWS(Error, make_bucket_plan(params, order, {{-7}}), "caps_bytes[0]", "got -7");
  CHECK_THROWS(Error, make_bucket_plan(with(1, spec("b", -1)), order, {{5}}), "parameter 'b' (index 1)",
               "numel must be at least 0, got -1");
  CHECK_THROWS(Error, make_bucket_plan(with(2, spec("c", 1, 0)), order, {{5}}), "parameter 'c' (index 2)",
               "itemsize must be at least 1, got 0");
  CHECK_THROWS(Error, make_bucket_plan(with(3, spec("d", int64_t{1} << 62)), order, {{5}}), "parameter 'd' (index 3)",
               "9223372036854775807 bytes");
  CHECK_THROWS(Error, make_bucket_plan(with(2, spec("c", 3, 8)), order, {{500}}), "parameter 'c' (index 2)",
               "has itemsize 8 in bucket 0 of itemsize 4");
  CHECK_THROWS(Error, make_bucket_plan(params, Longs{0, 1, 2}, {{5}}), "order has 3 entries for 4 parameters");
  CHECK_THROWS(Error, make_bucket_plan(params, Longs{0, 1, 2, 4}, {{5}}), "order[3] is 4", "from 0 to 3");
  CHECK_THROWS(Error, make_bucket_plan(params, Longs{0, 1, 1, 2}, {{5}}), "order[2] is 1 for the second time");
}

TEST(check_plan_says_what_is_wrong) {
  std::vector<ParamSpec> params = four_params();
  params[0].sparse = true;
  const BucketPlan good = make_bucket_plan(params, reverse_registration_order(4), {{1000}});
  check_plan(good, params);  // [d c b], [a sparse]; offsets 0, 40, 70
  CHECK(offsets_of(good.buckets.at(0)) == (Longs{0, 40, 70}));
  const auto broken = [&](auto change) {
    BucketPlan plan = good;
    change(plan.buckets);
    return plan;
  };
  using Buckets = std::vector<BucketSpec>;
  const auto expect = [&](auto change, const std::vector<std::string_view>& parts) {
    testing::check_throws<Error>([&] { check_plan(broken(change), params); }, parts, __FILE__, __LINE__);
  };
  expect([](Buckets& b) { b[0].slots.pop_back(); }, {"parameter 'b' (index 1) is in no bucket"});
  expect([](Buckets& b) { b[1].slots.clear(); }, {"bucket 1 has no slots"});
  expect([](Buckets& b) { b[0].slots[1].param = 9; }, {"bucket 0 holds parameter index 9", "0 to 3"});
  expect([](Buckets& b) { b[0].slots[1].param = -1; }, {"bucket 0 holds parameter index -1"});
  expect([](Buckets& b) { b.push_back(b[0]); }, {"parameter 'd' (index 3) is in bucket 0 and again in bucket 2"});
  using Change = void (*)(Buckets&);
  for (const Change change : std::initializer_list<Change>{
           [](Buckets& b) { b[0].dtype = 5; }, [](Buckets& b) { b[0].device = 2; },
           [](Buckets& b) { b[0].itemsize = 8; }, [](Buckets& b) { b[1].sparse = false; },
           [](Buckets& b) { b[0].slots[2].numel = 19; }, [](Buckets& b) { b[0].slots[1].offset = 41; },
           [](Buckets& b) { b[0].slots[0].offset = -4; }, [](Buckets& b) { b[0].numel = 91; },
           [](Buckets& b) { b[1].numel = 10; }}) {
    expect(change, {"the plan was made for other parameters"});
  }
  params[1].sparse = true;
  expect(
      [](Buckets& b) {
        b[1].slots.push_back({1, 0, 20});
        b[0].slots.pop_back();
        b[0].numel = 70;
      },
      {"parameter 'a' (index 0) is sparse but shares bucket 1 with parameter 'b' (index 1)"});
}

TEST(plan_words_are_as_documented) {
  const auto params = four_params();
  const BucketPlan plan = make_bucket_plan(params, reverse_registration_order(4), {{160}});
  CHECK(encode_plan(plan) == (Longs{~3, ~2, 1, ~0}));
}

TEST(corrupt_words_are_no_plan) {
  std::vector<ParamSpec> params = four_params();
  const Longs good = {~3, ~2, 1, ~0};
  CHECK_EQ(decode_plan(good, params).buckets.size(), 3u);
  const auto expect = [&](const Longs& words, const std::vector<std::string_view>& parts) {
    testing::check_throws<Error>([&] { decode_plan(words, params); }, parts, __FILE__, __LINE__);
  };
  expect({}, {"parameter 'a' (index 0) is in no bucket"});
  expect({3, ~2, 1, ~0}, {"encoded plan: the first word is 3, expected one below 0"});
  expect({~3, ~2, 1}, {"parameter 'a' (index 0) is in no bucket"});
  expect({~3, ~2, 4, ~0}, {"bucket 1 holds parameter index 4"});
  expect({~3, ~2, 3, ~0}, {"parameter 'd' (index 3) is in bucket 0 and again in bucket 1"});
  params[1].dtype = 5;
  expect(good, {"parameter 'b' (index 1) has dtype 5 in bucket 1 of dtype 6"});
  params[1].dtype = 6;
  params[2].sparse = true;
  expect(good, {"parameter 'b' (index 1) has sparse 0 in bucket 1 of sparse 1"});
  params[1].sparse = true;
  expect(good, {"parameter 'c' (index 2) is sparse but shares bucket 1"});
}

TEST(large_gradients_get_a_bucket_each_and_leave_the_others_grouped) {
  const std::vector<ParamSpec> params = {spec("a", 10), spec("big", 1000), spec("b", 10), spec("large", 250),
                                         spec("c", 10)};
  BucketLimits limits{{1 << 20}, 1000};
  const BucketPlan plan = make_bucket_plan(params, Longs{0, 1, 2, 3, 4}, limits);
  // 1000 bytes: a gradient at the limit counts as large. The bucket of the others is launched last, with the last gradient.
  CHECK(params_of(plan) == (Groups{{1}, {3}, {0, 2, 4}}));
  check_plan(plan, params);
  limits.solo_bytes = -1;
  CHECK_THROWS(Error, make_bucket_plan(params, Longs{0, 1, 2, 3, 4}, limits), "solo_bytes must be at least 0, got -1");
}

struct Case {
  std::vector<ParamSpec> params;
  Longs order;
  BucketLimits limits;
};

Case random_case(std::mt19937& random) {
  const auto below = [&](uint32_t bound) { return static_cast<int64_t>(random() % bound); };
  constexpr int64_t kItemsizes[] = {2, 4, 8, 16};
  Case result;
  const int64_t num_params = below(40);
  const int64_t owners = below(4);
  for (int64_t i = 0; i < num_params; ++i) {
    const int64_t dtype = below(4);
    result.params.push_back(spec(numbered("p", i), below(8) == 0 ? 0 : below(300), kItemsizes[dtype],
                                 static_cast<int32_t>(dtype), static_cast<int32_t>(below(2)), below(9) == 0));
    if (owners > 0) result.params.back().owner = static_cast<int32_t>(below(static_cast<uint32_t>(owners)));
  }
  result.order = reverse_registration_order(num_params);
  if (below(3) > 0) std::shuffle(result.order.begin(), result.order.end(), random);
  for (int64_t i = 0; i <= below(3); ++i) result.limits.caps_bytes.push_back(1 + below(4000));
  return result;
}

// What check_plan doesn't check: the grouping by caps and the launch order.
void check_grouping(const BucketPlan& plan, const Case& c) {
  Longs position(c.params.size());
  for (size_t i = 0; i < c.order.size(); ++i) position[static_cast<size_t>(c.order[i])] = static_cast<int64_t>(i);
  std::map<std::tuple<int32_t, int32_t, int32_t>, std::vector<const BucketSpec*>> of_kind;
  int64_t last_ready = -1;
  for (const BucketSpec& bucket : plan.buckets) {
    Longs ready;
    for (const Slot& slot : bucket.slots) ready.push_back(position[static_cast<size_t>(slot.param)]);
    CHECK(std::ranges::is_sorted(ready));
    CHECK(ready.back() > last_ready);
    last_ready = ready.back();
    if (!bucket.sparse) of_kind[{bucket.dtype, bucket.device, bucket.owner}].push_back(&bucket);
  }
  for (const auto& [kind, buckets] : of_kind) {
    for (size_t i = 0; i < buckets.size(); ++i) {
      int64_t bytes = 0;
      for (const Slot& slot : buckets[i]->slots) bytes += slot.numel * buckets[i]->itemsize;
      const int64_t last_bytes = buckets[i]->slots.back().numel * buckets[i]->itemsize;
      const int64_t cap = c.limits.caps_bytes[std::min(i, c.limits.caps_bytes.size() - 1)];
      CHECK(bytes - last_bytes < cap);                  // it closed as soon as it reached the cap
      if (i + 1 < buckets.size()) CHECK(bytes >= cap);  // and not before
    }
  }
}

TEST(random_plans_keep_every_promise_and_survive_the_broadcast) {
  std::mt19937 random(1234);
  for (int round = 0; round < 2000; ++round) {
    const Case c = random_case(random);
    const BucketPlan plan = make_bucket_plan(c.params, c.order, c.limits);
    check_plan(plan, c.params);
    check_grouping(plan, c);
    // Checks independently of check_plan which bytes belong to which parameter.
    std::set<int64_t> placed;
    for (const BucketSpec& bucket : plan.buckets) {
      int64_t end = 0;
      for (const Slot& slot : bucket.slots) {
        CHECK(placed.insert(slot.param).second);
        CHECK_EQ(slot.offset, bucket.sparse ? 0 : end);
        end = slot.offset + slot.numel;
      }
      CHECK_EQ(bucket.numel, bucket.sparse ? 0 : end);
    }
    CHECK_EQ(placed.size(), c.params.size());
    CHECK(make_bucket_plan(c.params, c.order, c.limits) == plan);
    const Longs words = encode_plan(plan);
    CHECK_EQ(std::ssize(words), std::ssize(c.params));
    CHECK(decode_plan(words, c.params) == plan);
  }
}

TEST(large_slots_lie_in_place_and_the_others_move_together) {
  std::vector<ParamSpec> params;
  for (const int64_t numel : {3, 100, 5, 99, 1}) {
    params.push_back({.name = "p", .numel = numel, .itemsize = 4, .alignment = 16});
  }
  const auto bucket = plan_of({{0, 1, 2, 3, 4}}, params).buckets.front();
  const auto laid = lay_in_place(bucket, params, 400);
  CHECK(offsets_of(laid) == (Longs{0, kInPlace, 4, 12, 112}));
  CHECK_EQ(laid.numel, 113);
  CHECK_EQ(lay_in_place(bucket, params, 1).numel, 0);
  CHECK(lay_in_place(bucket, params, 401) == bucket);
}

// Change one word or swap two: the result is an error, or another valid plan that encodes to the same words.
TEST(randomly_corrupt_words_never_give_a_broken_plan) {
  std::mt19937 random(4711);
  int64_t num_rejected = 0;
  int64_t num_accepted = 0;
  for (int round = 0; round < 4000; ++round) {
    const Case c = random_case(random);
    if (c.params.empty()) continue;
    Longs words = encode_plan(make_bucket_plan(c.params, c.order, c.limits));
    const Longs before = words;
    const Longs values = {-1, 0, 1, 2, 3, 41, INT64_MAX, INT64_MIN, static_cast<int64_t>(random() % 40)};
    if (round % 2 == 0) {
      words[random() % words.size()] = values[random() % values.size()];
    } else {
      std::swap(words[random() % words.size()], words[random() % words.size()]);
    }
    if (words == before) continue;
    try {
      const BucketPlan plan = decode_plan(words, c.params);
      check_plan(plan, c.params);
      CHECK(encode_plan(plan) == words);
      ++num_accepted;
    } catch (const Error&) {
      ++num_rejected;
    }
  }
  CHECK(num_rejected > 1000);
  CHECK(num_accepted > 100);
}

}  // namespace
}  // namespace torchddp::plan
