// A rank that is told by another of its threads to wait no longer, wherever it waits, and what its peers hear of it.
#include "shm_ranks.h"

namespace torchddp::shm {
namespace {

constexpr int64_t kLarge = 300'007;  // floats: several chunks of every shard
constexpr const char* kReason = "rank 11 failed: ValueError: no such file";

// Calls it in a moment, from a thread of its own.
class Later {
 public:
  explicit Later(std::function<void()> call)
      : thread_([call = std::move(call)] {
          std::this_thread::sleep_for(milliseconds(40));
          call();
        }) {}
  ~Later() { thread_.join(); }

 private:
  std::thread thread_;
};

TEST(shm_an_interrupt_ends_a_wait_and_all_later_calls) {
  for (const int64_t numel : {int64_t{10}, kLarge}) {
    Host host(2);
    const auto engine = host.engine(0);
    Exchange exchange(host, 0, {.numel = numel});
    exchange.start(*engine);
    const auto since = Clock::now();
    {
      const Later interrupt([&] {
        engine->interrupt(kReason);
        engine->interrupt("a second reason");
      });
      CHECK_EQ(error_of([&] { exchange.finish(*engine); }), kReason);
    }
    CHECK(ms_since(since) < kQuickly.count());
    CHECK_EQ(error_of([&] { engine->start({}); }), kReason);
    CHECK_EQ(error_of([&] { engine->poll(exchange.seq()); }), kReason);
    CHECK_EQ(error_of([&] { engine->wait_for(exchange.seq(), milliseconds(1), true); }), kReason);
    engine->progress();  // does nothing, and throws nothing
  }
}

// It sleeps with the engine's mutex in its hands, which the interrupt must not want.
TEST(shm_an_interrupt_ends_a_start_that_waits_for_a_slot) {
  Host host(2);
  const auto engine = host.engine(0);
  for (uint64_t i = 0; i < kSlots; ++i) engine->start({});
  const auto since = Clock::now();
  const Later interrupt([&] { engine->interrupt(kReason); });
  CHECK_EQ(error_of([&] { engine->start({}); }), kReason);
  CHECK(ms_since(since) < kQuickly.count());
}

TEST(shm_peers_of_an_interrupted_rank_give_up_too) {
  for (const int64_t numel : {int64_t{10}, kLarge}) {
    Host host(4);
    std::array<std::string, 4> messages;
    const auto since = Clock::now();
    check_ranks(4, [&](int rank) {
      if (rank == 1) return;
      const auto engine = host.engine(rank);
      Exchange exchange(host, rank, {.numel = numel});
      exchange.start(*engine);
      if (rank == 0) {
        const Later interrupt([&] { engine->interrupt(kReason); });
        messages[0] = error_of([&] { exchange.finish(*engine); });
      } else {
        messages[static_cast<size_t>(rank)] = error_of([&] { exchange.finish(*engine); });
      }
    });
    CHECK(ms_since(since) < kQuickly.count());
    CHECK_EQ(messages[0], kReason);
    CHECK(contains_all(messages[2], {"gave up", "all_reduce"}));
    CHECK(contains_all(messages[3], {"gave up", "all_reduce"}));
  }
}

// What comes from outside reaches ranks one after the other: a rank that sees a peer give up before it is told itself waits for its own
// reason, for a while, in wait() and poll() alike. That of the peer is no reason.
TEST(shm_an_interrupt_that_comes_after_a_peers_is_what_a_rank_raises) {
  for (const bool polls : {false, true}) {
    for (const int64_t numel : {int64_t{10}, kLarge}) {
      Host host(3);
      const auto peer = host.engine(0);
      const auto engine = host.engine(2);
      Exchange exchange(host, 2, {.numel = numel});
      exchange.start(*engine);
      peer->interrupt("rank 11 failed, says rank 10");
      const auto since = Clock::now();
      std::thread later([&] {
        std::this_thread::sleep_for(milliseconds(100));
        engine->interrupt(kReason);
      });
      const auto wait = [&] {
        while (polls && !engine->poll(exchange.seq())) std::this_thread::sleep_for(milliseconds(1));
        exchange.finish(*engine);
      };
      CHECK_EQ(error_of(wait), kReason);
      CHECK(ms_since(since) >= 100);
      CHECK(ms_since(since) < kQuickly.count());
      later.join();
    }
  }
}

TEST(shm_a_peer_that_gives_up_without_a_reason_is_named_within_a_second) {
  for (const bool polls : {false, true}) {
    for (const int64_t numel : {int64_t{10}, kLarge}) {
      Host host(3);
      const auto peer = host.engine(0);
      const auto engine = host.engine(2);
      Exchange exchange(host, 2, {.numel = numel});
      exchange.start(*engine);
      peer->interrupt(kReason);
      const auto since = Clock::now();
      const auto wait = [&] {
        while (polls && !engine->poll(exchange.seq())) std::this_thread::sleep_for(milliseconds(1));
        exchange.finish(*engine);
      };
      CHECK(contains_all(error_of(wait), {"rank 10 gave up before all_reduce"}));
      CHECK(ms_since(since) < 1000);
    }
  }
}

// Its own time is up before it was told anything: still not a peer that is only slow.
TEST(shm_a_peer_that_gave_up_is_named_when_the_time_is_up) {
  Host host(3);
  const auto peer = host.engine(0);
  const auto engine = host.engine(2);
  Exchange exchange(host, 2, {.numel = kLarge});
  exchange.start(*engine);
  peer->interrupt(kReason);
  CHECK(contains_all(error_of([&] { exchange.finish(*engine, milliseconds(50)); }), {"rank 10 gave up"}));
}

// At any instant of operations that go well: it ends with the reason, or with the result.
TEST(shm_an_interrupt_in_the_middle_of_work) {
  for (int round = 0; round < 20; ++round) {
    Host host(3);
    const std::vector<std::unique_ptr<Engine>> engines = [&] {
      std::vector<std::unique_ptr<Engine>> all;
      for (int rank = 0; rank < 3; ++rank) all.push_back(host.engine(rank));
      return all;
    }();
    std::thread interrupter([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
      engines[1]->interrupt(kReason);
    });
    std::array<std::string, 3> messages;
    // Peers may still read what an interrupted operation was given: it is kept until all have ended, as the transport does.
    std::array<std::vector<std::unique_ptr<Exchange>>, 3> exchanges;
    check_ranks(3, [&](int rank) {
      for (uint32_t step = 0; step < 200 && messages[static_cast<size_t>(rank)].empty(); ++step) {
        messages[static_cast<size_t>(rank)] = error_of([&] {
          const Spec spec{.numel = step % 2 == 0 ? 10 : 5'000, .salt = step};
          auto& exchange =
              exchanges[static_cast<size_t>(rank)].emplace_back(std::make_unique<Exchange>(host, rank, spec));
          exchange->start(*engines[static_cast<size_t>(rank)]);
          exchange->finish(*engines[static_cast<size_t>(rank)]);
        });
      }
    });
    interrupter.join();
    CHECK(messages[1].empty() || messages[1] == kReason);
    for (const int rank : {0, 2}) {
      const auto& message = messages[static_cast<size_t>(rank)];
      CHECK(message.empty() || contains_all(message, {"gave up"}));
    }
    CHECK_EQ(error_of([&] { engines[1]->start({}); }), kReason);
  }
}

}  // namespace
}  // namespace torchddp::shm
