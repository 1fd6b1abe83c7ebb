// Infinities and NaNs, counted while blocks are summed.
#include <cmath>
#include <limits>

#include "check.h"
#include "shm_ranks.h"

namespace torchddp::shm {
namespace {

constexpr int64_t kNumel = 100'003;  // several chunks and pieces, with tails
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// All-reduces of a block in which this rank has `bad` values at the given indices.
struct Sum {
  Sum(Segment& segment, int64_t numel) : segment(segment), numel(numel) {
    values = static_cast<float*>(segment.allocate(numel * 4));
  }
  ~Sum() { segment.release(values); }

  uint64_t start(Engine& engine, const std::vector<int64_t>& bad, float value, bool counts = true) {
    std::fill(values, values + numel, 1.0F);
    for (const auto place : bad) values[place] = value;
    found->inputs.store(0);
    found->sums_finite.store(false);
    return engine.start({.kind = OpKind::kAllReduce,
                         .type = kernels::DType::kF32,
                         .numel = numel,
                         .input = values,
                         .output = values,
                         .scale = 0.5,
                         .non_finite = counts ? found : nullptr});
  }

  Segment& segment;
  int64_t numel;
  float* values;
  std::shared_ptr<NonFinite> found = std::make_shared<NonFinite>();
};

TEST(shm_each_rank_is_told_what_is_not_finite_in_its_own_input) {
  for (const int size : {1, 2, 3}) {
    Host host(size);
    check_ranks(size, [&](int rank) {
      const auto engine = host.engine(rank);
      Sum sum(host.segment(rank), kNumel);
      for (int round = 0; round < 20; ++round) {
        // In every rank's shard and at its ends; as many as the rank's number, and none in every third round.
        std::vector<int64_t> bad;
        for (int i = 0; round % 3 != 0 && i <= rank; ++i) bad.push_back(i == 0 ? kNumel - 1 : i * (kNumel / 4));
        engine->wait(sum.start(*engine, bad, round % 2 == 0 ? kNan : kInf), milliseconds(0));
        require(sum.found->inputs.load() == static_cast<int64_t>(bad.size()),
                "the count of rank " + std::to_string(rank));
        require(sum.values[1] == 0.5F * static_cast<float>(size), "the sum is as without counting");
        require(std::isfinite(sum.values[kNumel - 1]) == (round % 3 == 0), "the sum tells it too");
        require(sum.found->sums_finite.load() == (round % 3 == 0), "all are told of the sum");
      }
    });
  }
}

TEST(shm_ranks_may_count_or_not) {
  constexpr int kSize = 2;
  Host host(kSize);
  check_ranks(kSize, [&](int rank) {
    const auto engine = host.engine(rank);
    Sum sum(host.segment(rank), kNumel);
    engine->wait(sum.start(*engine, {0, kNumel / 2, kNumel - 1}, kNan, rank == 1), milliseconds(0));
    require(sum.found->inputs.load() == (rank == 1 ? 3 : 0), "only who asked is told");
    require(!sum.found->sums_finite.load(), "neither of the ranks takes the sum for finite");
  });
}

// From finite inputs, in either rank's shard, and from one rank's input only. All ranks get the result.
TEST(shm_all_ranks_are_told_that_a_sum_is_not_finite) {
  constexpr int kSize = 3;
  constexpr float kLargest = std::numeric_limits<float>::max();
  Host host(kSize);
  check_ranks(kSize, [&](int rank) {
    const auto engine = host.engine(rank);
    Sum sum(host.segment(rank), kNumel);
    for (const int64_t place : {int64_t{0}, kNumel / 2, kNumel - 1}) {
      engine->wait(sum.start(*engine, {place}, kLargest), milliseconds(0));
      require(std::isinf(sum.values[place]) && !sum.found->sums_finite.load(), "an overflow");
      require(sum.found->inputs.load() == 0, "of finite inputs");
      engine->wait(sum.start(*engine, rank == 1 ? std::vector{place} : std::vector<int64_t>(), kNan), milliseconds(0));
      require(std::isnan(sum.values[place]) && !sum.found->sums_finite.load(), "a NaN of rank 1");
      require(sum.found->inputs.load() == (rank == 1 ? 1 : 0), "which rank 1 alone has");
      engine->wait(sum.start(*engine, {}, 0), milliseconds(0));
      require(sum.found->sums_finite.load(), "the next sum is finite");
    }
  });
}

// Small blocks are sent in slots and not checked, so the result is unknown rather than finite.
TEST(shm_sums_nobody_looked_at_are_not_called_finite) {
  Host host(2);
  check_ranks(2, [&](int rank) {
    const auto engine = host.engine(rank);
    Sum sum(host.segment(rank), 10);
    engine->wait(sum.start(*engine, {}, 0), milliseconds(0));
    require(!sum.found->sums_finite.load() && sum.found->inputs.load() == 0, "nothing is known");
  });
}

// Slots are reused before any wait; their counts are kept.
TEST(shm_counts_outlive_their_slots) {
  constexpr int kSize = 2;
  constexpr size_t kOperations = 2 * kSlots + 5;
  constexpr int64_t kSmall = 5'000;
  Host host(kSize);
  check_ranks(kSize, [&](int rank) {
    const auto engine = host.engine(rank);
    std::vector<std::unique_ptr<Sum>> sums;
    std::vector<uint64_t> started;
    for (size_t i = 0; i < kOperations; ++i) {
      sums.push_back(std::make_unique<Sum>(host.segment(rank), kSmall));
      std::vector<int64_t> bad(i % 4, static_cast<int64_t>(i));
      for (size_t k = 0; k < bad.size(); ++k) bad[k] += static_cast<int64_t>(k) * 1000;
      started.push_back(sums.back()->start(*engine, bad, kInf));
    }
    for (size_t i = kOperations; i-- > 0;) {
      engine->wait(started[i], milliseconds(0));
      require(sums[i]->found->inputs.load() == static_cast<int64_t>(i % 4),
              "the count of operation " + std::to_string(i));
    }
  });
}

}  // namespace
}  // namespace torchddp::shm
