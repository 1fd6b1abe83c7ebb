// Peers that die, leave, stop or call something else: all ranks raise errors that name them, long before a timeout.
#include "shm_ranks.h"

namespace torchddp::shm {
namespace {

constexpr int64_t kLarge = 300'007;  // floats: several chunks of every shard

TEST(shm_a_rank_that_died_is_named_soon) {
  for (const int64_t numel : {int64_t{10}, kLarge}) {
    Host host(3);
    host.gone[1].store(true);
    const auto messages = run_ranks(3, [&](int rank) {
      if (rank == 1) return;
      const auto engine = host.engine(rank);
      Exchange(host, rank, {.numel = numel}, *engine).finish(*engine);
    });
    for (const size_t rank : {0, 2}) {
      const bool first_hand = has(messages[rank], {"rank 11 died", "all_reduce"});
      CHECK(first_hand || has(messages[rank], {"rank 11 is missing: rank "}));
    }
  }
}

// Rank 2 did its part, took a chunk of rank 0's shard, and died with it.
TEST(shm_a_rank_that_died_while_it_helped_is_named_soon) {
  Host host(3);
  auto& dead = host.header(2);
  auto& slot = dead.slots[0];
  fill_post(slot.post, {.numel = kLarge}, host.segment(2).offset_of(host.segment(2).allocate(kLarge * 4)));
  slot.claimed.store(Tally::pack(0, Marks::kMaxChunks));
  slot.marks.store(Marks::none(0) | (Marks::bit(Marks::kMaxChunks) - 1));
  slot.post.number.store(1);
  dead.done.store(1);
  const auto first = host.engine(0);
  const Exchange mine(host, 0, {.numel = kLarge}, *first);
  host.header(0).slots[0].claimed.fetch_add(1);
  const auto second = host.engine(1);
  Exchange other(host, 1, {.numel = kLarge}, *second);
  host.gone[2].store(true);
  CHECK_THROWS(TransportError, other.finish(*second), "rank 12 died", "all_reduce");
}

// The same fault from the view of the shard's owner.
TEST(shm_the_owner_of_a_shard_hears_that_its_helper_died) {
  Host host(2);
  auto& dead = host.header(1);
  auto& slot = dead.slots[0];
  fill_post(slot.post, {.numel = kLarge}, host.segment(1).offset_of(host.segment(1).allocate(kLarge * 4)));
  slot.claimed.store(Tally::pack(0, 1000));
  slot.marks.store(Marks::none(kSlots));  // marks of a later operation count as complete
  const auto engine = host.engine(0);
  Exchange exchange(host, 0, {.numel = kLarge}, *engine);
  host.header(0).slots[0].claimed.fetch_add(1);
  slot.post.number.store(1);
  dead.done.store(1);
  host.gone[1].store(true);
  CHECK_THROWS(TransportError, exchange.finish(*engine), "rank 11 died");
}

TEST(shm_a_timeout_names_those_that_are_missing) {
  for (const int64_t numel : {int64_t{10}, kLarge}) {
    Host host(4);
    std::atomic<int> started{0};
    const auto messages = run_ranks(4, [&](int rank) {
      if (rank == 1 || rank == 3) return;
      const auto engine = host.engine(rank);
      Exchange exchange(host, rank, {.numel = numel}, *engine);
      // A rank that is preempted for 100 ms would be missing too.
      for (++started; started < 2;) std::this_thread::yield();
      exchange.finish(*engine, rank == 0 ? milliseconds(100) : kPatience);
    });
    CHECK(has(messages[0], {"timed out after 100 ms", "rank 11, rank 13", "all_reduce"}));
    CHECK(messages[0].find("rank 12") == std::string::npos);
    CHECK(has(messages[2], {" is missing: rank 10 gave up waiting"}));
  }
}

// The configured timeout applies to a wait without its own, and to a start that waits for a slot.
TEST(shm_the_configured_timeout_holds_where_none_is_given) {
  Host host(2);
  auto config = host.config(0);
  config.timeout = milliseconds(60);
  Engine engine(std::move(config));
  const std::string message = error_of([&] {
    for (uint64_t i = 0; i <= kSlots; ++i) engine.start({});
  });
  CHECK(has(message, {"timed out after 60 ms", "rank 11", "(operation 0)"}));
  Host other(2);
  config = other.config(0);
  config.timeout = milliseconds(40);
  Engine second(std::move(config));
  CHECK_THROWS(TransportError, second.wait(second.start({}), milliseconds(0)), "timed out after 40 ms", "rank 11");
}

TEST(shm_the_longest_of_timeouts_is_waited_for) {
  for (const auto limit : {milliseconds::max(), milliseconds(86'399'999'999'999'999)}) {
    Host host(2);
    check_ranks(2, [&](int rank) {
      auto config = host.config(rank);
      config.timeout = limit;
      Engine engine(std::move(config));
      std::this_thread::sleep_for(milliseconds(30 * rank));  // the other rank waits
      run_one(host, engine, rank, {.numel = kLarge});
      engine.wait(engine.start({}), milliseconds(0));
      Exchange exchange(host, rank, {.numel = 10}, engine);
      require(engine.wait_for(exchange.seq(), std::chrono::nanoseconds::max(), true), "it was not complete");
      exchange.finish(engine, limit);
    });
  }
}

TEST(shm_after_a_failure_every_call_throws_at_once) {
  Host host(2);
  const auto engine = host.engine(0);
  const auto seq = engine->start({});
  CHECK_THROWS(TransportError, engine->wait(seq, milliseconds(30)), "timed out after 30 ms");
  CHECK_THROWS(TransportError, engine->start({}), "timed out after 30 ms");
  CHECK_THROWS(TransportError, engine->poll(seq), "The shared-memory transport can't be used after that");
  CHECK_THROWS(TransportError, engine->wait(seq, kPatience), "The shared-memory transport can't be used after that");
  engine->progress();
}

// Two threads of a rank wait, and one times out and frees its memory. The other thread, which wakes just before it learns of the
// failure, must not perform what the peer then posts.
TEST(shm_after_a_failure_a_thread_that_waits_does_no_work_of_others) {
  constexpr int kRounds = 25;
  constexpr int64_t kNumel = 1000;
  int num_touched = 0;
  for (int round = 0; round < kRounds; ++round) {
    Host host(2);
    const auto engine = host.engine(0);
    const auto peer = host.engine(1);
    std::vector<float> input(kNumel, 1);
    std::vector<float> output(2 * kNumel, -1);
    const Operation mine{.kind = OpKind::kAllGather, .numel = kNumel, .input = input.data(), .output = output.data()};
    const auto seq = engine->start(mine);
    const auto later = engine->start({});
    std::string message;
    std::thread other([&] { message = error_of([&] { engine->wait(later, kPatience); }); });
    CHECK_THROWS(TransportError, engine->wait(seq, milliseconds(2 + round % 7)), "timed out");
    std::fill(output.begin(), output.end(), -2.0f);  // as the memory's next user would
    std::vector<float> gathered(2 * kNumel);
    CHECK(error_of([&] {
            peer->start(
                {.kind = OpKind::kAllGather, .numel = kNumel, .input = input.data(), .output = gathered.data()});
            for (int i = 0; i < 5; ++i) {
              std::this_thread::sleep_for(milliseconds(1));
              peer->progress();
            }
          }).empty());
    other.join();
    CHECK(has(message, {"timed out", "can't be used after that"}));
    num_touched += std::all_of(output.begin(), output.end(), [](float value) { return value == -2; }) ? 0 : 1;
  }
  CHECK_EQ(num_touched, 0);
}

TEST(shm_a_rank_that_leaves_is_missed_by_those_that_wait) {
  Host host(2);
  const auto messages = run_ranks(2, [&](int rank) {
    auto engine = host.engine(rank);
    run_one(host, *engine, rank, {.numel = 100});
    if (rank == 0) return engine->wait(engine->start({}), kPatience);
    std::this_thread::sleep_for(milliseconds(30));
    engine.reset();
    host.gone[1].store(true);  // its process exits normally, which is not a death
  });
  CHECK(has(messages[0], {"rank 11 has left"}));
  CHECK_EQ(messages[1], "");
}

// A complete operation stays complete, even if ranks have left.
TEST(shm_a_rank_that_leaves_after_its_part_is_not_missed) {
  Host host(2);
  auto first = host.engine(0);
  auto second = host.engine(1);
  Exchange mine(host, 0, {.numel = kLarge}, *first);
  Exchange other(host, 1, {.numel = kLarge}, *second);
  other.finish(*second);
  second.reset();
  host.gone[1].store(true);
  mine.finish(*first);
  CHECK(first->poll(mine.seq()));
}

TEST(shm_ranks_out_of_step_are_both_named) {
  const Spec specs[] = {{.numel = 101},
                        {.numel = 100, .op = kernels::ReduceOp::kMax},
                        {.numel = 100, .type = kernels::DType::kI32},
                        {.numel = kLarge},
                        {.kind = OpKind::kAllGather, .numel = 100},
                        {.kind = OpKind::kBroadcast, .numel = 100, .root = 1},
                        {.kind = OpKind::kReduce, .numel = 100, .root = 1}};
  for (const Spec& spec : specs) {
    Host host(2);
    const auto messages = run_ranks(2, [&](int rank) {
      const auto engine = host.engine(rank);
      run_one(host, *engine, rank, {.numel = 10});
      run_one(host, *engine, rank, rank == 0 ? Spec{.numel = 100} : spec);
    });
    int num_named = 0;
    for (const std::string& message : messages) {
      const bool names_both = has(message, {"out of step", "rank 10", "rank 11", "(operation 1)"});
      num_named += names_both ? 1 : 0;
      // The root of a broadcast waits for no rank: it may leave after its part.
      const bool is_other = has(message, {"gave up"}) || has(message, {"has left"}) || message.empty();
      CHECK_EQ(names_both || is_other ? "" : message, "");
    }
    CHECK(num_named >= 1);
  }
}

TEST(shm_ranks_out_of_step_say_what_each_does) {
  Host host(2);
  const auto first = host.engine(0);
  const auto second = host.engine(1);
  Exchange mine(host, 0, {.numel = 100}, *first);
  Exchange other(host, 1, {.kind = OpKind::kAllGather, .numel = 7, .type = kernels::DType::kF64});
  CHECK_THROWS(TransportError, other.start(*second), "rank 11 is in all_gather of 56 bytes (operation 0)",
               "rank 10 in all_reduce of 400 bytes (operation 0)");
  CHECK_THROWS(TransportError, mine.finish(*first), "rank 10 is in all_reduce of 400 bytes",
               "rank 11 in all_gather of 56");
}

}  // namespace
}  // namespace torchddp::shm
