// Operations between ranks on threads: every kind, size and number of ranks against closed-form results.
#include <algorithm>
#include <random>

#include "shm_ranks.h"

namespace torchddp::shm {
namespace {

using kernels::DType;
using kernels::ReduceOp;

constexpr int kSizes[] = {1, 2, 3, 4, 7};
// Sizes in floats: zero, one, odd sizes, around the slot's capacity, and around one chunk and one unit of a shard.
constexpr int64_t kNumels[] = {0, 1, 5, 127, 2047, 2048, 2049, 2311, 16'384, 16'385, 50'003};

TEST(shm_every_kind_size_and_number_of_ranks_gives_the_expected_bits) {
  for (const int size : kSizes) {
    std::vector<Spec> specs;
    for (const OpKind kind : kKinds) {
      for (const int64_t numel : kNumels) {
        specs.push_back({.kind = kind, .numel = numel, .root = static_cast<int>(numel % size), .salt = 1});
      }
    }
    Host host(size);
    run_all(host, specs);
  }
}

TEST(shm_every_type_and_reduction) {
  for (const int size : {2, 3}) {
    std::vector<Spec> specs;
    for (const DType type :
         {DType::kF64, DType::kF32, DType::kBF16, DType::kI8, DType::kU8, DType::kI16, DType::kI32, DType::kI64}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
        for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter}) {
          for (const int64_t numel : {17, 9001})
            specs.push_back({.kind = kind, .numel = numel, .type = type, .op = op});
        }
      }
    }
    Host host(size);
    run_all(host, specs);
  }
}

TEST(shm_several_chunks_and_shards_with_tails) {
  for (const int size : {2, 3, 7}) {
    if (kIsSanitized && size > 3) break;
    std::vector<Spec> specs;
    for (const int64_t bytes : {(int64_t{1} << 20), (int64_t{1} << 20) + 4, int64_t{1'234'564}}) {
      specs.push_back({.kind = OpKind::kAllReduce, .numel = bytes / 4});
    }
    specs.push_back({.kind = OpKind::kReduceScatter, .numel = 300'001});
    specs.push_back({.kind = OpKind::kAllGather, .numel = 300'001, .type = DType::kU8});
    Host host(size);
    run_all(host, specs);
  }
}

Spec random_spec(std::mt19937& random, int size) {
  const auto below = [&](uint32_t end) { return random() % end; };
  Spec spec;
  spec.kind = kKinds[below(std::size(kKinds))];
  spec.numel = below(4) == 0 ? 2000 + below(40'000) : below(1500);
  spec.root = static_cast<int>(below(static_cast<uint32_t>(size)));
  spec.salt = below(1000);
  return spec;
}

// Start more operations than there are slots without waiting; then wait in any order.
TEST(shm_more_operations_in_flight_than_slots_are_waited_for_in_any_order) {
  for (const int size : {1, 2, 3, 7}) {
    if (kIsSanitized && size != 3) continue;
    Host host(size);
    check_ranks(size, [&](int rank) {
      const auto engine = host.engine(rank);
      std::mt19937 same(static_cast<uint32_t>(size));
      std::mt19937 own(static_cast<uint32_t>(100 + rank));
      std::vector<std::unique_ptr<Exchange>> exchanges;
      for (uint64_t i = 0; i < 2 * kSlots + 40; ++i) {
        exchanges.push_back(std::make_unique<Exchange>(host, rank, random_spec(same, size), *engine));
        require(exchanges.back()->seq() == i, "operations are numbered from 0");
      }
      std::shuffle(exchanges.begin(), exchanges.end(), own);
      for (const auto& exchange : exchanges) {
        exchange->finish(*engine);
        require(engine->poll(exchange->seq()), "what was waited for is complete");
      }
    });
  }
}

// Slots are reused many times; each rank waits at random times.
TEST(shm_random_streams_with_random_waits) {
  constexpr int kSize = 3;
  Host host(kSize);
  check_ranks(kSize, [&](int rank) {
    const auto engine = host.engine(rank);
    std::mt19937 same(5);
    std::mt19937 own(static_cast<uint32_t>(rank));
    std::vector<std::unique_ptr<Exchange>> open;
    for (int i = 0; i < (kIsSanitized ? 300 : 600); ++i) {
      open.push_back(std::make_unique<Exchange>(host, rank, random_spec(same, kSize), *engine));
      while (!open.empty() && own() % 8 >= 5) {
        std::swap(open[own() % open.size()], open.back());
        if (own() % 2 == 0) {
          open.back()->finish(*engine);
        } else {
          while (!engine->poll(open.back()->seq())) engine->progress();
          open.back()->check();
        }
        open.pop_back();
      }
    }
    for (const auto& exchange : open) exchange->finish(*engine);
  });
}

TEST(shm_progress_from_another_thread) {
  constexpr int kSize = 3;
  Host host(kSize);
  check_ranks(kSize, [&](int rank) {
    const auto engine = host.engine(rank);
    std::atomic<bool> stop{false};
    std::thread helper([&] {
      while (!stop.load()) {
        engine->progress();
        std::this_thread::yield();
      }
    });
    const auto errors = run_ranks(1, [&](int) {
      std::mt19937 same(11);
      for (int round = 0; round < 12; ++round) {
        std::vector<std::unique_ptr<Exchange>> exchanges;
        for (int i = 0; i < 10; ++i) {
          exchanges.push_back(std::make_unique<Exchange>(host, rank, random_spec(same, kSize), *engine));
        }
        for (const auto& exchange : exchanges) exchange->finish(*engine);
      }
    });
    stop.store(true);
    helper.join();
    require(errors[0].empty(), errors[0]);
  });
}

// Two threads of each rank wait for different operations.
TEST(shm_two_threads_of_a_rank_wait) {
  constexpr int kSize = 2;
  Host host(kSize);
  check_ranks(kSize, [&](int rank) {
    const auto engine = host.engine(rank);
    std::vector<std::unique_ptr<Exchange>> exchanges;
    for (uint32_t i = 0; i < 20; ++i) {
      exchanges.push_back(std::make_unique<Exchange>(host, rank, Spec{.numel = 1000 + 300 * i, .salt = i}, *engine));
    }
    const auto errors = run_ranks(2, [&](int part) {
      for (size_t i = static_cast<size_t>(part); i < exchanges.size(); i += 2) exchanges[i]->finish(*engine);
    });
    for (const std::string& error : errors) require(error.empty(), error);
  });
}

// Rank 0 starts the operation and then is busy for a long time: the others sum its shard.
TEST(shm_a_rank_that_sleeps_holds_nobody_up) {
  constexpr int kSize = 3;
  Host host(kSize);
  std::atomic<bool> started{false};
  std::atomic<int> finished{0};
  check_ranks(kSize, [&](int rank) {
    const auto engine = host.engine(rank);
    while (rank != 0 && !started.load()) std::this_thread::yield();
    Exchange exchange(host, rank, {.numel = 300'007}, *engine);
    started.store(true);
    const auto since = Clock::now();
    while (rank == 0 && finished.load() < kSize - 1 && ms_since(since) < kPatience.count()) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    require(rank != 0 || finished.load() == kSize - 1, "the others waited for a rank that sleeps");
    exchange.finish(*engine);
    finished.fetch_add(1);
  });
}

// The last rank to post does its part in start(); the others sleep until woken.
TEST(shm_a_late_rank_wakes_those_that_sleep) {
  constexpr int kSize = 3;
  Host host(kSize);
  check_ranks(kSize, [&](int rank) {
    const auto engine = host.engine(rank);
    for (uint32_t round = 0; round < 6; ++round) {
      if (static_cast<uint32_t>(rank) == round % kSize) std::this_thread::sleep_for(milliseconds(30));
      run_one(host, *engine, rank, {.numel = round % 2 == 0 ? 100 : 20'000, .salt = round});
    }
  });
}

TEST(shm_several_threads_reduce_a_large_shard) {
  constexpr int kSize = 2;
  Host host(kSize);
  check_ranks(kSize, [&](int rank) {
    auto config = host.config(rank);
    std::atomic<int> calls{0};
    config.threads = 3;
    config.run_parallel = [&, base = config.run_parallel](int threads, const std::function<void()>& body) {
      require(threads == 3, "as many threads as were asked for");
      calls.fetch_add(1);
      base(threads, body);
    };
    Engine engine(std::move(config));
    constexpr int64_t kShardOf4MiB = (4 << 20) / 4 * kSize;
    run_one(host, engine, rank, {.numel = kShardOf4MiB * 11 / 10});
    run_one(host, engine, rank, {.numel = kShardOf4MiB * 9 / 10});
    require(calls.load() == 1, "small shards are one thread's");
  });
}

TEST(shm_a_barrier_has_no_memory) {
  for (const int size : kSizes) {
    Host host(size);
    std::atomic<int> entered{0};
    check_ranks(size, [&](int rank) {
      const auto engine = host.engine(rank);
      for (int round = 1; round <= 5; ++round) {
        entered.fetch_add(1);
        engine->wait(engine->start({}), kPatience);
        require(entered.load() >= round * size, "a barrier let a rank pass");
      }
    });
  }
}

// Two threads of a rank wait and a third starts what they wait for: none blocks another or misses a wake-up.
TEST(shm_threads_of_a_rank_wait_side_by_side) {
  Host host(2);
  check_ranks(2, [&](int rank) {
    const auto engine = host.engine(rank);
    for (int round = 0; round < 20; ++round) {
      Exchange small(host, rank, {.numel = 10}, *engine);
      Exchange large(host, rank, {.kind = OpKind::kAllGather, .numel = 10'000}, *engine);
      Exchange last(host, rank, {.numel = 50'000});
      std::thread first([&] { engine->wait(small.seq(), kPatience); });
      std::thread second([&] {
        while (!engine->wait_for(large.seq(), milliseconds(5), false)) {
        }
      });
      last.start(*engine);
      last.finish(*engine);
      first.join();
      second.join();
      small.check();
      large.check();
    }
  });
}

TEST(shm_a_wait_with_an_end_leaves_the_operation_alone) {
  Host host(2);
  const auto early = host.engine(0);
  Exchange mine(host, 0, {.numel = 10}, *early);
  CHECK(!early->wait_for(mine.seq(), milliseconds(30), true));
  CHECK(!early->wait_for(mine.seq(), milliseconds(0), false));
  const auto late = host.engine(1);
  Exchange other(host, 1, {.numel = 10}, *late);
  CHECK(early->wait_for(mine.seq(), kPatience, false));
  mine.finish(*early);
  other.finish(*late);
}

TEST(shm_an_abort_is_told_to_all) {
  Host host(2);
  const auto first = host.engine(0);
  const auto second = host.engine(1);
  Exchange exchange(host, 1, {.numel = 10}, *second);
  CHECK_THROWS(TransportError, first->give_up("nobody wants it any more"), "nobody wants it any more");
  CHECK_THROWS(TransportError, first->start({}), "nobody wants it any more");
  CHECK_THROWS(TransportError, second->wait(exchange.seq(), kPatience), "rank 10 gave up");
}

// A rank waits only for what it reads, so the root of a small broadcast doesn't wait.
TEST(shm_the_root_of_a_small_broadcast_does_not_wait) {
  Host host(2);
  const auto root = host.engine(0);
  Exchange sent(host, 0, {.kind = OpKind::kBroadcast, .numel = 100}, *root);
  CHECK(root->poll(sent.seq()));
  sent.finish(*root);
  const auto other = host.engine(1);
  Exchange received(host, 1, {.kind = OpKind::kBroadcast, .numel = 100}, *other);
  CHECK(other->poll(received.seq()));
  received.finish(*other);
}

// Only the root reads; the others wait until they may write to their blocks again.
TEST(shm_a_reduction_holds_up_who_gave_until_the_root_has_read) {
  Host host(3);
  std::array<std::unique_ptr<Engine>, 3> engines{host.engine(0), host.engine(1), host.engine(2)};
  const Spec spec{.kind = OpKind::kReduce, .numel = 50'003, .root = 1};
  std::array<std::unique_ptr<Exchange>, 3> parts;
  const auto start = [&](size_t rank) {
    parts[rank] = std::make_unique<Exchange>(host, static_cast<int>(rank), spec, *engines[rank]);
  };
  start(0);
  CHECK(!engines[0]->poll(parts[0]->seq()));
  start(1);
  CHECK(!engines[1]->poll(parts[1]->seq()));
  CHECK(!engines[0]->poll(parts[0]->seq()));
  start(2);
  CHECK(!engines[2]->poll(parts[2]->seq()));  // all data is there, but the root has not read it
  CHECK(engines[1]->poll(parts[1]->seq()));
  for (size_t rank = 0; rank < 3; ++rank) parts[rank]->finish(*engines[rank]);
}

TEST(shm_the_threads_of_a_root_share_a_large_reduction) {
  Host host(2);
  const Spec spec{.kind = OpKind::kReduce, .numel = 2'500'001, .root = 1};
  check_ranks(2, [&](int rank) {
    auto config = host.config(rank);
    config.threads = 3;
    Engine engine(std::move(config));
    run_one(host, engine, rank, spec);
  });
}

TEST(shm_a_root_that_died_is_named) {
  Host host(2);
  const auto giver = host.engine(0);
  Exchange part(host, 0, {.kind = OpKind::kReduce, .numel = 50'003, .root = 1}, *giver);
  host.gone[1].store(true);
  CHECK_THROWS(TransportError, giver->wait(part.seq(), kPatience), "rank 11 died");
}

TEST(shm_large_inputs_must_lie_in_the_segment) {
  Host host(1);
  const auto engine = host.engine(0);
  Bytes elsewhere(100'000);
  const Operation operation{.numel = 25'000, .input = elsewhere.data(), .output = elsewhere.data()};
  CHECK_THROWS(InternalError, engine->start(operation), "all_reduce", "not in the shared segment");
  auto* block = host.segment(0).base() + host.segment(0).bytes() - 99'999;
  CHECK_THROWS(InternalError, engine->start({.numel = 25'000, .input = block, .output = block}), "not in the shared");
  auto* in_header = host.segment(0).base() + offsetof(Header, slots);
  CHECK_THROWS(InternalError, engine->start({.numel = 25'000, .input = in_header, .output = in_header}), "not in the");
  run_one(host, *engine, 0, {.numel = 25'000});  // it was refused before it had any effect
  for (size_t i = 0; i < kSlots; ++i) run_one(host, *engine, 0, {.numel = 25'000});
  CHECK_THROWS(InternalError, engine->start(operation), "all_reduce", "not in the shared segment");
  run_one(host, *engine, 0, {.numel = 25'000});  // also refused in a reused slot
}

TEST(shm_a_rank_must_be_one_of_its_host) {
  Host host(2);
  auto config = host.config(0);
  config.rank = 2;
  CHECK_THROWS(InternalError, Engine(config), "rank 2 of 2");
  config.rank = -1;
  CHECK_THROWS(InternalError, Engine(config), "rank -1 of 2");
}

}  // namespace
}  // namespace torchddp::shm
