// Many ranks: results are bitwise those of rank order, and no rank needs another's help.
#include "shm_ranks.h"

namespace torchddp::shm {
namespace {

using kernels::DType;
using kernels::ReduceOp;

// Sizes in floats: zero, one, around the limits of posts, around a chunk, and several chunks.
constexpr int64_t kNumels[] = {0, 1, 256, 383, 384, 385, 2048, 2049, 16'385, 100'003};

std::vector<Spec> sums() {
  std::vector<Spec> specs;
  for (const int64_t numel : kNumels) specs.push_back({.numel = numel, .salt = 3});
  for (const int64_t numel : {100, 300, 40'000}) {
    specs.push_back({.numel = numel, .type = DType::kBF16});
    specs.push_back({.numel = numel, .type = DType::kF64});
    specs.push_back({.numel = numel, .type = DType::kI32, .op = ReduceOp::kMax});
  }
  return specs;
}

TEST(shm_bits_are_those_of_rank_order_for_any_number_of_ranks) {
  for (int size = 1; size <= 17; size += kIsSanitized ? 8 : 1) {
    Host host(size);
    run_all(host, sums());
  }
}

TEST(shm_bits_are_those_of_rank_order_for_many_ranks) {
  for (const int size : {31, 32, 64}) {
    if (kIsSanitized && size > 31) break;
    Host host(size);
    run_all(host, {{.numel = 1},
                   {.numel = 97},
                   {.numel = 98},
                   {.numel = 256},
                   {.numel = 50'003},
                   {.numel = 50, .type = DType::kBF16}});
  }
}

// All ranks in one thread: no rank waits, so none helps, and each does its own part.
class Together {
 public:
  explicit Together(Host& host) : host_(host) {
    host.make_roomy();
    for (int rank = 0; rank < host.size(); ++rank) engines_.push_back(host.engine(rank));
  }

  void run(const Spec& spec) {
    std::vector<std::unique_ptr<Exchange>> parts;
    for (int rank = 0; rank < host_.size(); ++rank) {
      parts.push_back(std::make_unique<Exchange>(host_, rank, spec, engine(rank)));
    }
    const auto all_done = [&] {
      bool done = true;
      for (int rank = 0; rank < host_.size(); ++rank) {
        done &= engine(rank).poll(parts[static_cast<size_t>(rank)]->seq());
      }
      return done;
    };
    for (int round = 0; round < 1000 && !all_done(); ++round) {
    }
    for (int rank = 0; rank < host_.size(); ++rank) parts[static_cast<size_t>(rank)]->finish(engine(rank));
  }

  Engine& engine(int rank) { return *engines_[static_cast<size_t>(rank)]; }

 private:
  Host& host_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

TEST(shm_nobody_needs_help_where_each_rank_has_a_processor) {
  for (const int size : {2, 5, 9, 17}) {
    if (kIsSanitized && size > 9) break;
    Host host(size);
    Together ranks(host);
    for (const Spec& spec : sums()) ranks.run(spec);
  }
  CHECK(true);
}

// A rank that posts and never returns blocks the ranks that need its slot, which name it.
TEST(shm_a_rank_that_died_before_it_took_a_sum_is_named) {
  constexpr int kSize = 6;
  Host host(kSize);
  host.make_roomy();
  Together ranks(host);
  std::vector<std::unique_ptr<Exchange>> parts;
  const auto start = [&](int rank) {
    parts.push_back(std::make_unique<Exchange>(host, rank, Spec{.numel = 10}, ranks.engine(rank)));
  };
  for (uint64_t i = 0; i < kSlots; ++i) {
    for (const int rank : {5, 1, 2, 3, 4, 0}) {
      if (i == 0 || rank != 5) start(rank);
    }
    if (i == 0) {
      for (int rank = 0; rank < kSize - 1; ++rank) ranks.engine(rank).poll(0);
    }
  }
  host.gone[5].store(true);
  CHECK_THROWS(TransportError, start(1), "rank 15 died");
}

}  // namespace
}  // namespace torchddp::shm
