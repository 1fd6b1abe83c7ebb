// A rank interrupted by another of its threads, wherever it waits, and the errors of its peers.
#include <optional>

#include "shm_ranks.h"

namespace torchddp::shm {
namespace {

constexpr int64_t kLarge = 300'007;  // floats: several chunks of every shard
constexpr const char* kReason = "rank 11 failed: ValueError: no such file";

TEST(shm_an_interrupt_ends_a_wait_and_all_later_calls) {
  for (const int64_t numel : {int64_t{10}, kLarge}) {
    Host host(2);
    const auto engine = host.engine(0);
    Exchange exchange(host, 0, {.numel = numel}, *engine);
    {
      const Later interrupt([&] {
        engine->interrupt(kReason);
        engine->interrupt("a second reason");
      });
      CHECK_EQ(error_of([&] { exchange.finish(*engine); }), kReason);
    }
    CHECK_EQ(error_of([&] { engine->start({}); }), kReason);
    CHECK_EQ(error_of([&] { engine->poll(exchange.seq()); }), kReason);
    CHECK_EQ(error_of([&] { engine->wait_for(exchange.seq(), milliseconds(1), true); }), kReason);
    engine->progress();  // does nothing, without an exception
  }
}

// No thread waits for that operation yet, so the interrupt must reach start() itself.
TEST(shm_an_interrupt_ends_a_start_that_waits_for_a_slot) {
  Host host(2);
  const auto engine = host.engine(0);
  for (uint64_t i = 0; i < kSlots; ++i) engine->start({});
  const Later interrupt([&] { engine->interrupt(kReason); });
  CHECK_EQ(error_of([&] { engine->start({}); }), kReason);
}

TEST(shm_peers_of_an_interrupted_rank_give_up_too) {
  for (const int64_t numel : {int64_t{10}, kLarge}) {
    Host host(4);
    const auto messages = run_ranks(4, [&](int rank) {
      if (rank == 1) return;
      const auto engine = host.engine(rank);
      Exchange exchange(host, rank, {.numel = numel}, *engine);
      const Later interrupt([&] {
        if (rank == 0) engine->interrupt(kReason);
      });
      exchange.finish(*engine);
    });
    CHECK_EQ(messages[0], kReason);
    for (const size_t rank : {2, 3}) CHECK(has(messages[rank], {"gave up", "all_reduce"}));
  }
}

// An external interrupt reaches ranks one after the other. A rank that sees a peer give up waits a while for its own interrupt, in
// wait() and poll() alike, and reports the peer only if none arrives.
TEST(shm_an_interrupt_that_comes_after_a_peers_is_what_a_rank_raises) {
  for (const bool is_told : {true, false}) {
    for (const bool polls : {false, true}) {
      for (const int64_t numel : {int64_t{10}, kLarge}) {
        Host host(3);
        const auto peer = host.engine(0);
        auto config = host.config(2);
        config.reason_patience = is_told ? kPatience : milliseconds(100);
        Engine engine(std::move(config));
        Exchange exchange(host, 2, {.numel = numel}, engine);
        peer->interrupt("rank 11 failed, says rank 10");
        std::optional<Later> interrupt;
        if (is_told) interrupt.emplace([&] { engine.interrupt(kReason); });
        const auto message = error_of([&] {
          while (polls && !engine.poll(exchange.seq())) std::this_thread::sleep_for(milliseconds(1));
          exchange.finish(engine);
        });
        CHECK(is_told ? message == kReason : has(message, {"rank 10 gave up before all_reduce"}));
      }
    }
  }
}

// It times out before an interrupt arrives: the error still says that the peer gave up, not that it is slow.
TEST(shm_a_peer_that_gave_up_is_named_when_the_time_is_up) {
  Host host(3);
  const auto peer = host.engine(0);
  const auto engine = host.engine(2);
  Exchange exchange(host, 2, {.numel = kLarge}, *engine);
  peer->interrupt(kReason);
  CHECK(has(error_of([&] { exchange.finish(*engine, milliseconds(50)); }), {"rank 10 gave up"}));
}

// What a signal handler raises, in place of Python.
struct Raised final : std::runtime_error, SignalInterrupt {
  using std::runtime_error::runtime_error;
};

// Handlers during its lifetime: they return, except for the third, which raises.
class Handlers {
 public:
  explicit Handlers(Engine& engine) {
    engine_ = &engine;
    calls_ = 0;
    signal_check = [] {
      // While a thread waits for the GIL, the engine's mutex must be free for others.
      std::thread([] { engine_->wait_for(0, milliseconds(0), false); }).join();
      if (++calls_ == 3) throw Raised("KeyboardInterrupt");
    };
  }
  ~Handlers() { signal_check = nullptr; }
  int calls() const { return calls_; }

 private:
  static inline Engine* engine_ = nullptr;
  static inline int calls_ = 0;
};

template <class Call>
std::string raised_by(const Call& call) {
  return testing::thrown_by<Raised>(call);
}

TEST(shm_a_handler_that_raises_ends_a_wait_and_the_peers_hear_of_it) {
  for (const int64_t numel : {int64_t{10}, kLarge}) {
    Host host(3);
    const auto engine = host.engine(0);
    const auto peer = host.engine(2);
    Exchange exchange(host, 0, {.numel = numel}, *engine);
    Exchange others(host, 2, {.numel = numel}, *peer);
    {
      const Handlers handlers(*engine);
      CHECK_EQ(raised_by([&] { exchange.finish(*engine); }), "KeyboardInterrupt");
      CHECK_EQ(handlers.calls(), 3);
    }
    CHECK(has(error_of([&] { engine->start({}); }), {"rank 10 gave up", "signal handler", "all_reduce"}));
    CHECK(has(error_of([&] { others.finish(*peer); }), {"rank 10 gave up before all_reduce"}));
  }
}

TEST(shm_a_handler_that_raises_ends_a_start_that_waits_for_a_slot) {
  Host host(2);
  const auto engine = host.engine(0);
  for (uint64_t i = 0; i < kSlots; ++i) engine->start({});
  const Handlers handlers(*engine);
  CHECK_EQ(raised_by([&] { engine->start({}); }), "KeyboardInterrupt");
}

// Short waits never take the GIL, and background threads don't either.
TEST(shm_handlers_run_in_long_waits_alone) {
  Host host(2);
  const auto engine = host.engine(0);
  const auto seq = engine->start({});
  const Handlers handlers(*engine);
  const auto since = Clock::now();
  CHECK(!engine->wait_for(seq, milliseconds(20), true));
  CHECK(handlers.calls() == 0 || Clock::now() - since >= kSignalInterval);  // a busy machine makes a short wait long
  const int before = handlers.calls();
  CHECK(!engine->wait_for(seq, milliseconds(250), false));
  CHECK_EQ(handlers.calls(), before);
  CHECK_EQ(raised_by([&] { engine->wait_for(seq, kPatience, true); }), "KeyboardInterrupt");
}

// Threads that wait for the same slot each get one, in any order.
TEST(shm_threads_that_wait_for_a_slot_get_one_each) {
  Host host(2);
  const auto engine = host.engine(0);
  const auto peer = host.engine(1);
  for (uint64_t i = 0; i < kSlots; ++i) engine->start({});
  std::array<uint64_t, 3> seqs{};
  std::vector<std::thread> threads;
  for (auto& seq : seqs) threads.emplace_back([&] { seq = engine->start({}); });
  std::this_thread::sleep_for(milliseconds(30));
  for (uint64_t i = 0; i < kSlots + seqs.size(); ++i) peer->wait(peer->start({}), kPatience);
  for (auto& thread : threads) thread.join();
  std::sort(seqs.begin(), seqs.end());
  CHECK(seqs == (std::array<uint64_t, 3>{kSlots, kSlots + 1, kSlots + 2}));
}

// At any time during successful operations: they end with the reason or with the result.
TEST(shm_an_interrupt_in_the_middle_of_work) {
  for (int round = 0; round < 20; ++round) {
    Host host(3);
    const std::array<std::unique_ptr<Engine>, 3> engines{host.engine(0), host.engine(1), host.engine(2)};
    // Peers may still read an interrupted operation's input, so it is kept until all have ended, as the transport does.
    std::array<std::vector<std::unique_ptr<Exchange>>, 3> exchanges;
    const auto messages = run_ranks(4, [&](int rank) {
      if (rank == 3) {
        std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
        return engines[1]->interrupt(kReason);
      }
      auto& engine = *engines[static_cast<size_t>(rank)];
      for (uint32_t step = 0; step < 200; ++step) {
        const Spec spec{.numel = step % 2 == 0 ? 10 : 5'000, .salt = step};
        auto& own = exchanges[static_cast<size_t>(rank)];
        own.emplace_back(std::make_unique<Exchange>(host, rank, spec))->start(engine);
        own.back()->finish(engine);
      }
    });
    CHECK(messages[1].empty() || messages[1] == kReason);
    for (const size_t rank : {0, 2}) CHECK(messages[rank].empty() || has(messages[rank], {"gave up"}));
    CHECK_EQ(error_of([&] { engines[1]->start({}); }), kReason);
  }
}

}  // namespace
}  // namespace torchddp::shm
