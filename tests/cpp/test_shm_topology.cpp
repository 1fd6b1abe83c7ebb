// Many ranks on one or several NUMA nodes: results are bitwise those of rank order, with little traffic.
#include <cstdio>
#include <cstdlib>

#include "shm_ranks.h"

namespace torchddp::shm {
namespace {

using kernels::DType;
using kernels::ReduceOp;

// Sanitizers are ten to twenty times slower, so they run each kind once.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif

// Sizes in floats: zero, one, around the limits of chains and of posts, around a chunk, and several chunks.
constexpr int64_t kNumels[] = {0, 1, 255, 256, 257, 2048, 2049, 16'385, 100'003};

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

// `count` runs of `each` ranks.
std::vector<int> nodes(int count, int each) {
  std::vector<int> result;
  for (int node = 0; node < count; ++node) result.insert(result.end(), static_cast<size_t>(each), node);
  return result;
}

std::vector<int> taking_turns(int size) {
  std::vector<int> result;
  for (int rank = 0; rank < size; ++rank) result.push_back(rank % 2);
  return result;
}

const std::vector<std::vector<int>> kTopologies = {
    nodes(2, 1), {0, 1, 1},   nodes(2, 2),  nodes(2, 4),     {0, 0, 0, 0, 0, 1, 1}, {5, 2, 2, 2, 2, 2},
    nodes(3, 3), nodes(8, 1), nodes(2, 10), taking_turns(6), {0, 0, 1, 1, 0, 0},    nodes(4, 8),
};

TEST(shm_bits_are_those_of_rank_order_for_any_number_of_ranks) {
  for (int size = 1; size <= 17; size += kIsSanitized ? 4 : 1) {
    Host host(size);
    run_all(host, sums());
  }
}

TEST(shm_bits_are_those_of_rank_order_for_many_ranks) {
  for (const int size : {31, 32, 64}) {
    if (kIsSanitized && size > 31) break;
    Host host(size);
    run_all(host,
            {{.numel = 1}, {.numel = 256}, {.numel = 257}, {.numel = 50'003}, {.numel = 50, .type = DType::kBF16}});
  }
}

TEST(shm_bits_are_those_of_rank_order_on_any_nodes) {
  for (const auto& topology : kTopologies) {
    for (const bool roomy : {false, true}) {
      if (kIsSanitized && topology.size() > 9) continue;
      Host host(topology);
      if (roomy) host.make_roomy();
      run_all(host, sums());
    }
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
  Transfers transfers() {
    Transfers total;
    for (const auto& engine : engines_) total += engine->board().transfers();
    return total;
  }

 private:
  Host& host_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

TEST(shm_nobody_needs_help_where_each_rank_has_a_processor) {
  for (const auto& topology : kTopologies) {
    if (kIsSanitized && topology.size() > 9) continue;
    Host host(topology);
    Together ranks(host);
    for (const Spec& spec : sums()) ranks.run(spec);
  }
  CHECK(true);
}

// A leader that posts and never returns: others pass its sums on.
TEST(shm_a_chain_goes_on_without_its_leaders) {
  constexpr int kSize = 20;
  Host host(kSize);
  host.make_roomy();
  std::atomic<int> finished{0};
  check_ranks(kSize, [&](int rank) {
    const auto engine = host.engine(rank);
    const bool leads = engine->board().groups().leader_of(rank) == rank;
    Exchange exchange(host, rank, {.numel = 100}, *engine);
    while (leads && finished.load() < kSize - static_cast<int>(engine->board().groups().small().size())) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    exchange.finish(*engine);
    finished.fetch_add(1);
  });
}

// A leader sees only its own group's posts, so partial sums carry their operation.
TEST(shm_groups_in_different_operations_are_out_of_step) {
  constexpr int kSize = 10;
  constexpr int kFirstOfSecond = 5;
  const std::vector<Spec> others = {{.numel = 12},
                                    {.numel = 10, .op = ReduceOp::kMax},
                                    {.kind = OpKind::kBroadcast, .numel = 10, .root = kFirstOfSecond}};
  for (const Spec& other : others) {
    Host host(kSize);
    host.make_roomy();
    const auto errors = run_ranks(kSize, [&](int rank) {
      const auto engine = host.engine(rank);
      const Exchange exchange(host, rank, rank < kFirstOfSecond ? Spec{.numel = 10} : other, *engine);
      engine->wait(exchange.seq(), kPatience);
    });
    for (size_t rank = 0; rank < kFirstOfSecond; ++rank) {
      CHECK(has(errors[rank], {"out of step"}) || has(errors[rank], {"gave up"}));
    }
  }
}

// A rank that posts and never returns blocks the ranks that need its slot, which name it.
TEST(shm_a_rank_that_died_before_it_took_a_total_is_named) {
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

// Traffic of an operation, summed over all ranks: the mean of several.
Transfers transfers_of(const std::vector<int>& topology, int64_t numel, uint64_t rounds) {
  Host host(topology);
  Together ranks(host);
  for (uint64_t i = 0; i < rounds; ++i) ranks.run({.numel = numel});
  const auto before = ranks.transfers();
  for (uint64_t i = 0; i < rounds; ++i) ranks.run({.numel = numel});
  auto after = ranks.transfers();
  const auto each = [&](int64_t to, int64_t from) { return (to - from) / static_cast<int64_t>(rounds); };
  return {each(after.lines, before.lines), each(after.far_lines, before.far_lines), each(after.bytes, before.bytes),
          each(after.far_bytes, before.far_bytes)};
}

// For `python -m benchmarks.host_model`, on request.
void report(const std::vector<int>& topology, int64_t bytes, const Transfers& counted) {
  if (const char* path = std::getenv("TORCHDDP_COUNTS_FILE"); path != nullptr) {
    std::FILE* file = std::fopen(path, "a");
    require(file != nullptr, "can't write to TORCHDDP_COUNTS_FILE");
    std::fprintf(file,
                 "{\"ranks\": %zu, \"nodes\": %d, \"message_bytes\": %lld, \"lines\": %lld, \"far_lines\": %lld, "
                 "\"bytes\": %lld, \"far_bytes\": %lld}\n",
                 topology.size(), topology.back() + 1, static_cast<long long>(bytes),
                 static_cast<long long>(counted.lines), static_cast<long long>(counted.far_lines),
                 static_cast<long long>(counted.bytes), static_cast<long long>(counted.far_bytes));
    std::fclose(file);
  }
}

// Each rank but one reads its leader's total, and a leader reads each rank but one; once per kSlots operations each rank
// reads every other's progress.
TEST(shm_a_small_all_reduce_moves_two_messages_a_rank) {
  for (const int64_t bytes : {8, 64, 1024}) {
    for (const int each : {1, 2, 3, 4, 8, 16, 32, 64}) {
      for (const int count : {1, 2}) {
        const auto topology = nodes(count, each);
        const auto size = static_cast<int64_t>(topology.size());
        if (size == 1 || (kIsSanitized && size > 8)) continue;
        const auto counted = transfers_of(topology, bytes / 4, kSlots);
        report(topology, bytes, counted);
        const auto messages = size <= 4 ? size * (size - 1) : 2 * (size - 1);
        CHECK_EQ(counted.lines, messages * parcel_lines(bytes) + size * (size - 1) / static_cast<int64_t>(kSlots));
        CHECK_EQ(counted.bytes, 0);
        if (count == 2 && size > 4) {
          // The partial sum in one direction and the total in the other, read by each leader there.
          const auto leaders = (each + 7) / 8;
          const auto looks = size * size / 2 / static_cast<int64_t>(kSlots);
          CHECK_EQ(counted.far_lines, (1 + leaders) * parcel_lines(bytes) + looks);
        }
      }
    }
  }
}

TEST(shm_a_large_all_reduce_crosses_the_link_twice) {
  for (const int64_t numel : {int64_t{16} * 1024, int64_t{256} * 1024}) {
    for (const int each : {1, 2, 4, 8}) {
      if (kIsSanitized && each > 2) break;
      const auto bytes = numel * 4;
      const auto one = transfers_of(nodes(1, 2 * each), numel, 1);
      report(nodes(1, 2 * each), bytes, one);
      const int64_t size = 2 * each;
      CHECK_EQ(one.bytes, 2 * (size - 1) * bytes);  // each owner reads its shard from all others and writes it back
      const auto two = transfers_of(nodes(2, each), numel, 1);
      report(nodes(2, each), bytes, two);
      CHECK_EQ(two.far_bytes, 2 * bytes);
      CHECK_EQ(two.bytes, (4 * (each - 1) + 2) * bytes);
    }
  }
}

}  // namespace
}  // namespace torchddp::shm
