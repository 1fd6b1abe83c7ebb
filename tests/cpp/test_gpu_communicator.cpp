// The NCCL communicator against a table that writes down its calls: order, streams, lifetimes, and every way to fail.
#include <sys/wait.h>
#include <unistd.h>

#include <memory>

#include "check.h"
#include "common/errors.h"
#include "common/signals.h"
#include "gpu/all_reduce_together.h"
#include "gpu/communicator.h"
#include "gpu/ready_clock.h"
#include "gpu_recorder.h"

namespace torchddp::gpu {
namespace {

using namespace std::chrono_literals;
using testing::Diary;
using testing::RecordingDevice;
using testing::RecordingNccl;
using Lines = std::vector<std::string>;

struct Fixture {
  Diary diary;
  std::shared_ptr<RecordingDevice> device = std::make_shared<RecordingDevice>(diary);
  std::shared_ptr<RecordingNccl> nccl = std::make_shared<RecordingNccl>(diary);
  CommunicatorConfig config{1, 4, 2s, 2s, 1ms, 20ms};
  std::chrono::milliseconds timeout = 10min;  // of operations

  std::unique_ptr<Communicator> make() { return std::make_unique<Communicator>(nccl, device, config, UniqueId{}); }
  void all_reduce(Communicator& comm, Ticket& ticket, int64_t numel = 8, int64_t bucket = -1,
                  std::shared_ptr<void> keep = nullptr) {
    comm.start(
        ticket, {"all_reduce", numel, bucket, timeout},
        [&](Comm handle, Stream stream) {
          return nccl->all_reduce(nullptr, nullptr, numel, kernels::DType::kF32, kPlainSum, handle, stream);
        },
        std::move(keep));
  }
};

template <typename Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const TransportError& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, std::initializer_list<const char*> words) {
  return std::all_of(words.begin(), words.end(),
                     [&](const char* word) { return text.find(word) != std::string::npos; });
}

// Calls NCCL as another thread does.
struct Caller {
  template <typename Body>
  explicit Caller(Body body) : thread([this, body] { error = error_of(body); }) {}
  const std::string& end() {
    thread.join();
    return error;
  }
  std::string error;
  std::thread thread;
};

bool soon(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + 5s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

TEST(gpu_an_operation_is_queued_between_events) {
  Fixture f;
  {
    const auto comm = f.make();
    f.diary.take();
    f.device->idle = false;
    Ticket ticket;
    f.all_reduce(*comm, ticket);
    // s1 is the compute stream, s2 the communicator's; e1 the fork.
    CHECK(f.diary.take() == (Lines{"record e1 s1", "s2 waits e1", "all_reduce 8 s2", "record e2 s2"}));
    CHECK(!comm->ended(ticket));
    f.device->current = 5;  // whoever joins
    comm->join(ticket);
    CHECK(f.diary.take() == (Lines{"s5 waits e2"}));
    f.device->idle = true;
    CHECK(comm->ended(ticket));
  }
  CHECK(f.diary.take() == (Lines{"finalize", "destroy", "synchronize"}));
  CHECK_EQ(f.device->alive.load(), 0);
}

TEST(gpu_operations_under_way_have_events_of_their_own_which_come_back) {
  Fixture f;
  f.config.watch_interval = 10min;
  const auto comm = f.make();
  f.device->idle = false;
  std::array<Ticket, 3> tickets;
  for (auto& ticket : tickets) {
    f.all_reduce(*comm, ticket);
  }
  f.diary.take();
  comm->join(tickets[2]);
  comm->join(tickets[0]);
  CHECK(f.diary.take() == (Lines{"s1 waits e4", "s1 waits e2"}));
  f.device->idle = true;
  Ticket next;
  f.all_reduce(*comm, next);  // puts two away
  CHECK_EQ(f.diary.count("record e3 s2"), 1);
  f.diary.take();
  comm->join(tickets[0]);  // was put away: nothing to wait for
  CHECK(f.diary.take().empty());
  const auto events = f.device->alive.load();
  for (int i = 0; i < 100; ++i) {
    f.all_reduce(*comm, next);
    comm->join(next);
  }
  CHECK_EQ(f.device->alive.load(), events);
}

TEST(gpu_what_an_operation_uses_goes_when_it_is_joined) {
  Fixture f;
  const auto comm = f.make();
  f.device->idle = false;
  auto memory = std::make_shared<int>(3);
  const std::weak_ptr<int> alive = memory;
  Ticket ticket;
  f.all_reduce(*comm, ticket, 8, 0, std::move(memory));
  CHECK(!alive.expired());
  f.diary.take();
  comm->join(ticket);  // what is queued behind this wait may use the memory
  CHECK(f.diary.take() == (Lines{"s1 waits e2"}));
  CHECK(alive.expired());
  comm->join(ticket);
  f.device->idle = true;
}

TEST(gpu_what_an_abandoned_operation_uses_lives_until_the_device_is_done) {
  Fixture f;
  const auto comm = f.make();
  f.device->idle = false;
  auto memory = std::make_shared<int>(3);
  const std::weak_ptr<int> alive = memory;
  Ticket abandoned;
  Ticket next;
  f.all_reduce(*comm, abandoned, 8, 0, std::move(memory));
  std::this_thread::sleep_for(20ms);
  CHECK(!alive.expired());
  f.device->idle = true;
  // Not on the watchdog's thread: at the next call.
  CHECK(soon([&] {
    f.all_reduce(*comm, next);
    comm->join(next);
    return alive.expired();
  }));
}

TEST(gpu_an_operation_in_a_graph_is_joined_by_its_own_event_and_not_watched) {
  Fixture f;
  f.timeout = 5ms;
  const auto comm = f.make();
  f.device->captures = true;
  f.device->idle = false;  // an event of a graph is never seen to finish
  Ticket ticket;
  f.diary.take();
  f.all_reduce(*comm, ticket);
  comm->join(ticket);
  CHECK(f.diary.take() == (Lines{"record e1 s1", "s2 waits e1", "all_reduce 8 s2", "record e2 s2", "s1 waits e2"}));
  CHECK(comm->ended(ticket));
  std::this_thread::sleep_for(30ms);
  CHECK_EQ(error_of([&] { comm->check(); }), "");
  const auto alive = f.device->alive.load();
  f.all_reduce(*comm, ticket);  // the same event again
  CHECK_EQ(f.device->alive.load(), alive);
  comm->forget(ticket);
  CHECK_EQ(f.device->alive.load(), alive - 1);
}

TEST(gpu_a_call_in_progress_is_waited_for_before_the_next) {
  Fixture f;
  f.config.watch_interval = 10min;
  f.nccl->init_result = kNcclInProgress;
  f.nccl->in_progress = 3;
  const auto comm = f.make();
  CHECK_EQ(f.nccl->in_progress.load(), 0);
  f.nccl->call_result = kNcclInProgress;
  f.nccl->in_progress = 2;
  Ticket ticket;
  f.diary.take();
  f.all_reduce(*comm, ticket);
  CHECK_EQ(f.nccl->in_progress.load(), 0);
  CHECK_EQ(f.diary.take().back(), "record e2 s2");
}

// NCCL connects when the first operation of a kind is started: a peer that still compiles is waited for as long as an operation may take.
TEST(gpu_a_peer_that_is_late_for_the_first_call_has_the_time_of_an_operation) {
  Fixture f;
  f.config.connect_timeout = 20ms;
  const auto comm = f.make();
  f.nccl->connect_hangs = true;
  Ticket ticket;
  Caller caller([&] { f.all_reduce(*comm, ticket); });
  std::this_thread::sleep_for(60ms);
  CHECK_EQ(f.nccl->inside.load(), 1);
  f.nccl->let_go(f.nccl->connect_hangs);
  CHECK_EQ(caller.end(), "");
  comm->join(ticket);
}

TEST(gpu_a_call_that_stays_in_progress_runs_into_the_time_limit) {
  Fixture f;
  f.timeout = 20ms;
  const auto comm = f.make();
  f.nccl->call_result = kNcclInProgress;
  f.nccl->async = kNcclInProgress;
  Ticket ticket;
  const auto message = error_of([&] { f.all_reduce(*comm, ticket, 8, 2); });
  CHECK(has(message, {"rank 1 of 4", "all_reduce of 8 elements (bucket 2)", "did not get under way within 20 ms"}));
  f.nccl->async = kNcclSuccess;
  CHECK(soon([&] { return f.diary.count("abort") == 1; }));
}

// The abort frees it.
TEST(gpu_a_call_that_is_stuck_inside_runs_into_the_time_limit) {
  Fixture f;
  auto comm = f.make();
  f.nccl->connect_hangs = true;
  f.timeout = 20ms;
  Ticket stuck;
  CHECK(has(error_of([&] { f.all_reduce(*comm, stuck, 8, 2); }),
            {"rank 1 of 4", "all_reduce of 8 elements (bucket 2)", "did not get under way within 20 ms"}));
  CHECK(has(error_of([&] { comm->check(); }), {"bucket 2"}));
  CHECK_EQ(f.diary.count("abort"), 1);
  comm.reset();
  CHECK(!f.nccl->used_after_abort);
  CHECK_EQ(f.device->alive.load(), 0);
}

TEST(gpu_a_group_that_is_stuck_leaves_an_aborted_communicator_alone) {
  Fixture f;
  const auto comm = f.make();
  f.nccl->connect_hangs = true;
  std::array<Memory, 1> others{{{&f, 8}}};
  Ticket ticket;
  const auto message = error_of([&] {
    comm->start(
        ticket, {"all_reduce", 8, 2, 20ms},
        [&](Comm handle, Stream stream) {
          return all_reduce_together(*f.nccl, handle, stream, kernels::DType::kF32, {&f, 4}, others, 0.25, 4);
        },
        nullptr);
  });
  CHECK(has(message, {"rank 1 of 4", "(bucket 2)", "did not get under way within 20 ms"}));
  CHECK_EQ(f.diary.count("group end"), 1);
  CHECK(!f.nccl->used_after_abort);
}

TEST(gpu_an_operation_that_does_not_end_breaks_the_communicator) {
  Fixture f;
  f.timeout = 20ms;
  auto comm = f.make();
  f.device->idle = false;
  Ticket ticket;
  f.all_reduce(*comm, ticket, 1000, 3);
  comm->join(ticket);  // queues a wait: does not block, does not throw
  CHECK(soon([&] { return f.diary.count("abort") == 1; }));
  const auto message = error_of([&] { comm->check(); });
  CHECK(has(message, {"rank 1 of 4", "all_reduce of 1000 elements (bucket 3)", "20 ms", "aborted"}));
  CHECK_EQ(error_of([&] { comm->join(ticket); }), message);
  CHECK_EQ(error_of([&] { f.all_reduce(*comm, ticket); }), message);
  CHECK(comm->ended(ticket));
  comm.reset();
  CHECK_EQ(f.diary.count("abort"), 1);
  CHECK_EQ(f.diary.count("finalize") + f.diary.count("destroy"), 0);
  CHECK_EQ(f.device->alive.load(), 0);
}

TEST(gpu_the_longest_of_timeouts_is_waited_for) {
  Fixture f;
  f.timeout = f.config.connect_timeout = f.config.leave_timeout = std::chrono::milliseconds::max();
  f.nccl->init_result = kNcclInProgress;
  f.nccl->in_progress = 3;
  const auto comm = f.make();
  f.device->idle = false;
  Ticket ticket;
  f.all_reduce(*comm, ticket);
  std::this_thread::sleep_for(30ms);  // the watchdog looks
  CHECK_EQ(error_of([&] { comm->check(); }), "");
  f.device->idle = true;
}

TEST(gpu_time_counts_from_the_end_of_the_operation_before) {
  Fixture f;
  f.timeout = 1000ms;
  const auto comm = f.make();
  std::array<Ticket, 2> tickets;
  for (int i = 0; i < 5; ++i) {  // 1.5 s in all, none of it too long
    f.device->idle = false;
    f.all_reduce(*comm, tickets[0]);
    std::this_thread::sleep_for(300ms);
    const int before = f.device->seen_idle;
    f.device->idle = true;
    CHECK(soon([&] { return f.device->seen_idle > before; }));
  }
  CHECK_EQ(error_of([&] { comm->check(); }), "");
}

TEST(gpu_an_asynchronous_error_breaks_the_communicator) {
  Fixture f;
  auto comm = f.make();
  f.device->idle = false;
  Ticket ticket;
  f.all_reduce(*comm, ticket, 10, 1);
  f.nccl->async = 6;
  CHECK(soon([&] { return f.diary.count("abort") == 1; }));
  CHECK(
      has(error_of([&] { comm->check(); }), {"rank 1 of 4", "error 6", "during all_reduce of 10 elements (bucket 1)"}));
}

TEST(gpu_a_call_that_fails_breaks_the_communicator_at_once) {
  Fixture f;
  const auto comm = f.make();
  f.nccl->call_result = 5;
  Ticket ticket;
  CHECK(has(error_of([&] { f.all_reduce(*comm, ticket); }), {"all_reduce of 8 elements failed", "error 5"}));
  f.nccl->call_result = kNcclSuccess;
  CHECK(has(error_of([&] { f.all_reduce(*comm, ticket); }), {"error 5"}));
  CHECK(soon([&] { return f.diary.count("abort") == 1; }));
}

TEST(gpu_a_device_that_fails_is_a_transport_error) {
  Fixture f;
  const auto comm = f.make();
  f.device->broken = true;
  Ticket ticket;
  CHECK(has(error_of([&] { f.all_reduce(*comm, ticket); }), {"could not be queued", "fallen off the bus"}));
}

TEST(gpu_an_interrupt_aborts_and_every_later_call_says_why) {
  Fixture f;
  auto comm = f.make();
  f.device->idle = false;
  Ticket ticket;
  f.all_reduce(*comm, ticket);
  comm->interrupt("rank 3 failed");
  comm->interrupt("a second reason");
  CHECK(soon([&] { return f.diary.count("abort") == 1; }));
  CHECK_EQ(error_of([&] { comm->check(); }), "rank 3 failed");
  CHECK_EQ(error_of([&] { comm->join(ticket); }), "rank 3 failed");
  CHECK_EQ(error_of([&] { f.all_reduce(*comm, ticket); }), "rank 3 failed");
  CHECK_EQ(error_of([&] { comm->allocate(64); }), "rank 3 failed");
  comm.reset();
  CHECK_EQ(f.diary.count("abort"), 1);
  CHECK_EQ(f.device->alive.load(), 0);
}

TEST(gpu_an_interrupt_ends_a_call_that_is_in_progress) {
  Fixture f;
  const auto comm = f.make();
  f.nccl->call_result = kNcclInProgress;
  f.nccl->in_progress = 1'000'000'000;
  Ticket ticket;
  Caller caller([&] { f.all_reduce(*comm, ticket); });
  std::this_thread::sleep_for(30ms);
  comm->interrupt("rank 3 failed");
  CHECK_EQ(caller.end(), "rank 3 failed");
  f.nccl->in_progress = 0;
  CHECK(soon([&] { return f.diary.count("abort") == 1; }));
}

TEST(gpu_nobody_waits_for_a_call_that_is_stuck_inside_and_an_interrupt_ends_it) {
  Fixture f;
  const auto comm = f.make();
  f.device->idle = false;
  Ticket queued;
  f.all_reduce(*comm, queued);
  f.nccl->connect_hangs = true;
  Ticket stuck;
  Caller caller([&] { f.all_reduce(*comm, stuck); });
  CHECK(soon([&] { return f.nccl->inside == 1; }));
  comm->check();
  comm->join(queued);
  CHECK(!comm->ended(queued));
  comm->interrupt("rank 3 failed");
  CHECK_EQ(caller.end(), "rank 3 failed");
  CHECK(!f.nccl->used_after_abort);
}

// NCCL frees what a call uses: one that is on its way out is not aborted.
TEST(gpu_an_abort_waits_for_a_call_that_is_on_its_way_out) {
  Fixture f;
  f.config.call_grace = 10min;
  const auto comm = f.make();
  f.nccl->connect_hangs = true;
  Ticket ticket;
  Caller caller([&] { f.all_reduce(*comm, ticket); });
  CHECK(soon([&] { return f.nccl->inside == 1; }));
  comm->interrupt("rank 3 failed");
  std::this_thread::sleep_for(30ms);
  CHECK_EQ(f.diary.count("abort"), 0);
  f.nccl->let_go(f.nccl->connect_hangs);
  CHECK_EQ(caller.end(), "rank 3 failed");
  CHECK(soon([&] { return f.diary.count("abort") == 1; }));
  CHECK(!f.nccl->used_after_abort);
}

TEST(gpu_an_abort_that_hangs_holds_nobody_up) {
  Fixture f;
  f.timeout = 5ms;
  f.config.leave_timeout = 50ms;
  auto comm = f.make();
  f.device->idle = false;
  f.nccl->abort_hangs = true;
  Ticket ticket;
  f.all_reduce(*comm, ticket);
  CHECK(soon([&] { return f.diary.count("abort") == 1; }));
  CHECK(has(error_of([&] { comm->check(); }), {"did not finish"}));
  const auto since = std::chrono::steady_clock::now();
  comm.reset();
  CHECK(std::chrono::steady_clock::now() - since < 2s);
  // The thread it was left to needs table and device until it is through.
  const std::weak_ptr<RecordingNccl> nccl = f.nccl;
  f.nccl->let_go(f.nccl->abort_hangs);
  f.device.reset();
  CHECK(soon([&] { return nccl.use_count() == 1; }));
}

TEST(gpu_leaving_with_operations_under_way_aborts_in_time) {
  Fixture f;
  f.config.leave_timeout = 30ms;
  auto comm = f.make();
  f.device->idle = false;
  Ticket ticket;
  f.all_reduce(*comm, ticket);
  comm.reset();
  CHECK_EQ(f.diary.count("abort"), 1);
  CHECK_EQ(f.diary.count("finalize"), 0);
}

TEST(gpu_a_peer_that_does_not_leave_is_not_waited_for) {
  for (const bool blocks : {false, true}) {
    Fixture f;
    f.config.leave_timeout = 30ms;
    auto comm = f.make();
    f.nccl->finalize_result = kNcclInProgress;
    f.nccl->async = kNcclInProgress;
    f.nccl->finalize_hangs = blocks;
    comm.reset();
    CHECK_EQ(f.diary.count("finalize"), 1);
    CHECK_EQ(f.diary.count("destroy"), 0);
    CHECK_EQ(f.diary.count("abort"), 1);
    CHECK_EQ(f.device->alive.load(), 0);
  }
}

TEST(gpu_neither_a_stuck_leaving_nor_a_stuck_abort_holds_anybody_up) {
  Fixture f;
  f.config.leave_timeout = 30ms;
  auto comm = f.make();
  f.nccl->finalize_hangs = f.nccl->abort_hangs = true;
  const auto since = std::chrono::steady_clock::now();
  comm.reset();
  CHECK(std::chrono::steady_clock::now() - since < 3s);
  const std::weak_ptr<RecordingNccl> nccl = f.nccl;
  f.nccl->let_go(f.nccl->abort_hangs);
  CHECK(soon([&] { return nccl.use_count() == 1; }));
}

// In the child there is neither the watchdog nor a driver, and a lock that some thread held stays locked.
TEST(gpu_a_forked_child_drops_its_copies_and_nothing_else) {
  Fixture f;
  auto comm = f.make();
  auto memory = comm->allocate(64);
  auto left = comm->allocate(64);
  f.device->captures = true;
  Ticket captured;
  f.all_reduce(*comm, captured);
  f.device->captures = false;
  auto clock = std::make_unique<ReadyClock>(f.device, 3);
  Ticket ticket;
  f.nccl->connect_hangs = true;
  Caller caller([&] { f.all_reduce(*comm, ticket, 8, -1, std::move(left)); });
  CHECK(soon([&] { return f.nccl->inside == 1; }));
  f.diary.take();
  const auto events = f.device->alive.load();
  const auto child = fork();
  if (child == 0) {
    alarm(20);
    comm->forget(captured);
    memory.reset();
    clock.reset();
    comm.reset();
    _exit(f.diary.take().empty() && f.device->alive == events && f.nccl->blocks == 2 ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  f.nccl->let_go(f.nccl->connect_hangs);
  CHECK_EQ(caller.end(), "");
  comm->forget(captured);
  comm->check();
}

TEST(gpu_a_communicator_that_can_not_be_made_says_why_and_leaves_nothing) {
  Fixture f;
  f.config.connect_timeout = 20ms;
  f.nccl->init_result = 3;
  CHECK(has(error_of([&] { f.make(); }), {"rank 1 of 4: could not make a NCCL communicator", "error 3"}));
  f.nccl->refuse_comm = true;
  CHECK(has(error_of([&] { f.make(); }), {"rank 1 of 4: could not make a NCCL communicator", "error 3"}));
  f.nccl->refuse_comm = false;
  f.nccl->init_result = kNcclInProgress;
  f.nccl->async = kNcclInProgress;
  CHECK(has(error_of([&] { f.make(); }), {"could not make a NCCL communicator within 20 ms"}));
  CHECK_EQ(f.diary.count("abort"), 2);
  CHECK_EQ(f.device->alive.load(), 0);
}

TEST(gpu_a_rank_that_waits_for_the_others_to_connect_is_left_behind) {
  Fixture f;
  f.config.connect_timeout = 20ms;
  f.nccl->init_hangs = true;
  CHECK(has(error_of([&] { f.make(); }), {"rank 1 of 4", "within 20 ms", "Some rank has not come to it"}));
  CHECK_EQ(f.diary.count("abort"), 0);  // there is nothing yet
  const std::weak_ptr<RecordingNccl> nccl = f.nccl;
  f.nccl->let_go(f.nccl->init_hangs);
  CHECK(soon([&] { return nccl.use_count() == 1; }));
  CHECK_EQ(f.diary.count("abort"), 1);  // what came too late
}

TEST(gpu_settings_and_priority_reach_nccl) {
  Fixture f;
  f.config.settings = {{{"min_ctas", 4}}, "IB"};
  f.make();
  CHECK_EQ(f.nccl->last_settings.numbers.at("min_ctas"), 4);
  CHECK_EQ(f.nccl->last_settings.net_name, "IB");
  CHECK_EQ(f.device->high_priority_streams.load(), 0);
  f.config.high_priority = true;
  f.make();
  CHECK_EQ(f.device->high_priority_streams.load(), 1);
}

TEST(gpu_a_library_older_than_the_header_is_refused) {
  Fixture f;
  f.nccl->running = 22809;
  CHECK(has(error_of([&] { f.make(); }), {"built with NCCL 2.29.7", "NCCL 2.28.9 is loaded"}));
  CHECK_EQ(version_problem(23007, 22907), "");
  CHECK_EQ(version_problem(22903, 22907), "");
  CHECK(version_problem(30100, 22907) != "");
}

TEST(gpu_memory_is_registered_and_given_back_where_ranks_agree) {
  Fixture f;
  auto comm = f.make();
  f.diary.take();
  auto first = comm->allocate(4096);
  auto second = comm->allocate(64);
  CHECK(f.diary.take().empty());
  CHECK(comm->memory_state() != 0);
  comm->commit_memory(1s);
  CHECK(f.diary.take() == (Lines{"register 4096", "register 64"}));
  first.reset();
  auto third = comm->allocate(128);
  CHECK(f.diary.take().empty());
  comm->memory_state();
  comm->commit_memory(1s);
  CHECK(f.diary.take() == (Lines{"synchronize", "deregister", "free", "register 128"}));
  third.reset();
  comm.reset();
  CHECK(f.diary.take() == (Lines{"finalize", "destroy", "synchronize", "free"}));
  second.reset();  // outlived the communicator
  CHECK(f.diary.take() == (Lines{"synchronize", "free"}));
  CHECK_EQ(f.nccl->blocks.load(), 0);
}

// Two ranks, as NCCL sees them.
struct Ranks {
  Fixture f0, f1;
  std::unique_ptr<Communicator> comm0 = f0.make(), comm1 = f1.make();

  std::array<std::shared_ptr<void>, 2> allocate(int64_t bytes) {
    return {comm0->allocate(bytes), comm1->allocate(bytes)};
  }
  bool agree() { return comm0->memory_state() == comm1->memory_state(); }
  void commit() {
    comm0->commit_memory(1s);
    comm1->commit_memory(1s);
  }
};

TEST(gpu_ranks_that_would_register_differently_notice) {
  Ranks ranks;
  auto same = ranks.allocate(4096);
  CHECK(ranks.agree());
  ranks.commit();
  CHECK(ranks.agree());
  {
    const auto more = ranks.comm1->allocate(64);
    CHECK(!ranks.agree());
  }
  CHECK(ranks.agree());  // it is gone again, and was never registered
  // One alone gives up a step, and lays its buckets out again.
  same[0] = ranks.comm0->allocate(4096);
  CHECK(!ranks.agree());
  same[1] = ranks.comm1->allocate(4096);
  CHECK(ranks.agree());
  ranks.commit();
  CHECK(ranks.agree());
  // What one rank's program holds on to.
  same[0].reset();
  CHECK(!ranks.agree());
}

TEST(gpu_ranks_whose_windows_lie_elsewhere_notice) {
  Ranks ranks;
  auto a = ranks.allocate(64);
  auto b = ranks.allocate(64);
  CHECK(ranks.agree());
  ranks.commit();
  a[0].reset();
  b[1].reset();
  CHECK(!ranks.agree());
  ranks.comm0->give_back_memory(1s);
  ranks.comm1->give_back_memory(1s);
  CHECK(!ranks.agree());  // as many windows on both, but not at the same places
}

TEST(gpu_the_order_in_which_memory_is_let_go_of_does_not_matter) {
  Ranks ranks;
  auto a = ranks.allocate(64);
  auto b = ranks.allocate(128);
  ranks.agree();
  ranks.commit();
  a[0].reset(), b[0].reset();
  b[1].reset(), a[1].reset();
  CHECK(ranks.agree());
}

TEST(gpu_what_comes_after_ranks_told_waits_for_the_next_time) {
  Fixture f;
  const auto comm = f.make();
  auto told = comm->allocate(64);
  comm->memory_state();
  told.reset();  // by another thread
  const auto later = comm->allocate(128);
  f.diary.take();
  comm->commit_memory(1s);
  CHECK(f.diary.take() == (Lines{"register 64"}));
  comm->memory_state();
  comm->commit_memory(1s);
  CHECK(f.diary.take() == (Lines{"synchronize", "deregister", "free", "register 128"}));
}

// What an abandoned operation holds on to counts as let go of on all ranks alike.
TEST(gpu_memory_in_use_is_waited_for_before_ranks_tell) {
  Fixture f;
  f.config.watch_interval = 10min;
  const auto comm = f.make();
  auto memory = comm->allocate(4096);
  comm->memory_state();
  comm->commit_memory(1s);
  const auto empty = comm->memory_state();
  Ticket ticket;
  f.all_reduce(*comm, ticket, 8, 0, std::move(memory));
  f.diary.take();
  CHECK(comm->memory_state() != empty);
  CHECK(f.diary.take() == (Lines{"synchronize"}));
  comm->commit_memory(1s);
  CHECK(f.diary.take() == (Lines{"synchronize", "deregister", "free"}));
}

TEST(gpu_a_registration_that_the_peers_do_not_come_to_is_a_transport_error) {
  Fixture f;
  const auto comm = f.make();
  const auto memory = comm->allocate(64);
  comm->memory_state();
  f.nccl->async = kNcclInProgress;
  CHECK(has(error_of([&] { comm->commit_memory(20ms); }), {"rank 1 of 4", "registering memory", "within 20 ms"}));
}

TEST(gpu_memory_of_torch_makes_room) {
  Fixture f;
  const auto comm = f.make();
  f.diary.take();
  f.nccl->allocs_that_fail = 1;
  CHECK(comm->allocate(123) != nullptr);
  CHECK_EQ(f.diary.count("release_cache"), 1);
  f.nccl->allocs_that_fail = 2;
  CHECK(comm->allocate(123) == nullptr);  // this rank alone: no error, and nobody was called
  CHECK_EQ(f.diary.count("release_cache"), 2);
  comm->check();
}

TEST(gpu_a_rank_alone_has_no_windows) {
  Fixture f;
  f.config.rank = 0;
  f.config.size = 1;
  CHECK(!f.make()->uses_windows());
}

TEST(gpu_an_old_library_has_no_windows) {
  Fixture f;
  const auto comm = f.make();
  CHECK(comm->uses_windows());
  // Built against one that has them, so this can't be loaded; but what decides is the lower of the two.
  f.nccl->running = kWindowsVersion - 1;
  CHECK(!comm->uses_windows());
}

TEST(gpu_a_communicator_in_a_graph_is_left_behind) {
  Fixture f;
  auto comm = f.make();
  auto memory = comm->allocate(4096);
  comm->memory_state();
  comm->commit_memory(1s);
  f.device->captures = true;
  Ticket ticket;
  f.all_reduce(*comm, ticket);
  comm->join(ticket);
  comm->forget(ticket);
  f.device->captures = false;
  f.diary.take();
  comm.reset();  // NCCL's own leaving waits for the graph
  CHECK_EQ(f.diary.count("finalize") + f.diary.count("destroy") + f.diary.count("abort"), 0);
  CHECK_EQ(f.device->alive.load(), 0);
  memory.reset();
  CHECK_EQ(f.nccl->blocks.load(), 0);
}

struct Raised final : std::runtime_error, SignalInterrupt {
  using std::runtime_error::runtime_error;
};

// A handler that returns lets the call go on, one that raises ends it. No lock is held meanwhile that letting go of memory wants.
TEST(gpu_handlers_of_signals_run_while_a_call_is_in_progress) {
  static std::shared_ptr<void> block;
  static int calls = 0;
  Fixture f;
  const auto comm = f.make();
  block = comm->allocate(64);
  calls = 0;
  f.nccl->call_result = kNcclInProgress;
  f.nccl->async = kNcclInProgress;
  signal_check = [] {
    std::thread([] { block.reset(); }).join();
    if (++calls == 2) throw Raised("KeyboardInterrupt");
  };
  Ticket ticket;
  std::string raised;
  try {
    f.all_reduce(*comm, ticket, 8, 2);
  } catch (const Raised& error) {
    raised = error.what();
  }
  signal_check = nullptr;
  CHECK_EQ(raised, "KeyboardInterrupt");
  CHECK_EQ(calls, 2);
  CHECK(has(error_of([&] { comm->check(); }), {"handler of a signal", "all_reduce of 8 elements (bucket 2)"}));
  CHECK(soon([&] { return f.diary.count("abort") == 1; }));
  f.nccl->async = kNcclSuccess;
}

TEST(gpu_a_handler_of_a_signal_can_t_wait_for_the_call_that_it_interrupts) {
  static Communicator* comm;
  static std::string nested;
  Fixture f;
  const auto made = f.make();
  comm = made.get();
  nested.clear();
  f.nccl->call_result = kNcclInProgress;
  f.nccl->async = kNcclInProgress;
  signal_check = [] {
    Ticket ticket;
    nested =
        error_of([&] { comm->start(ticket, {"broadcast", 3}, [](Comm, Stream) { return kNcclSuccess; }, nullptr); });
    throw Raised("enough");
  };
  Ticket ticket;
  try {
    f.all_reduce(*made, ticket, 8, 2);
  } catch (const Raised&) {
  }
  signal_check = nullptr;
  CHECK(has(nested,
            {"rank 1 of 4", "broadcast of 3 elements", "handler of a signal", "all_reduce of 8 elements (bucket 2)"}));
  f.nccl->async = kNcclSuccess;
}

TEST(gpu_handlers_of_signals_run_while_a_communicator_is_made) {
  static int calls = 0;
  calls = 0;
  Fixture f;
  f.config.connect_timeout = 10min;
  f.nccl->init_hangs = true;
  signal_check = [] {
    if (++calls == 2) throw Raised("KeyboardInterrupt");
  };
  std::string raised;
  try {
    f.make();
  } catch (const Raised& error) {
    raised = error.what();
  }
  signal_check = nullptr;
  CHECK_EQ(raised, "KeyboardInterrupt");
  const std::weak_ptr<RecordingNccl> nccl = f.nccl;
  f.nccl->let_go(f.nccl->init_hangs);
  CHECK(soon([&] { return nccl.use_count() == 1; }));
}

// Nothing is in flight when graphs are replayed, and nobody calls.
TEST(gpu_errors_are_looked_for_once_something_was_captured) {
  Fixture f;
  const auto comm = f.make();
  std::this_thread::sleep_for(20ms);
  CHECK_EQ(f.nccl->asked.load(), 0);
  f.device->captures = true;
  Ticket ticket;
  f.all_reduce(*comm, ticket);
  comm->join(ticket);
  f.device->captures = false;
  CHECK(soon([&] { return f.nccl->asked > 2; }));
  const testing::StderrInto captured;
  f.nccl->async = 6;
  CHECK(soon([&] { return f.diary.count("abort") == 1; }));
  CHECK(has(captured.text(), {"torchddp: rank 1 of 4: NCCL reports: error 6"}));
  CHECK(has(error_of([&] { comm->check(); }), {"error 6"}));
  CHECK(has(error_of([&] { f.all_reduce(*comm, ticket); }), {"error 6"}));
  comm->forget(ticket);
}

TEST(gpu_communicators_of_one_device_launch_in_the_order_of_the_host) {
  Fixture f;
  Fixture other;
  other.device = f.device;
  other.nccl = std::make_shared<RecordingNccl>(f.diary);
  const auto first = f.make();       // s2
  const auto second = other.make();  // s3
  f.diary.take();
  Ticket a;
  Ticket b;
  f.all_reduce(*first, a, 1);
  other.all_reduce(*second, b, 2);
  f.all_reduce(*first, a, 3);
  Lines launches;
  for (const auto& line : f.diary.take()) {
    if (line.starts_with("all_reduce")) launches.push_back(line);
  }
  CHECK(launches == (Lines{"all_reduce 1 s2", "all_reduce 2 s3", "all_reduce 3 s2"}));
}

TEST(gpu_a_spoilt_graph_does_not_break_the_communicator) {
  Fixture f;
  const auto comm = f.make();
  f.device->captures = true;
  f.device->spoilt_graph = true;
  Ticket ticket;
  bool thrown = false;
  try {
    f.all_reduce(*comm, ticket);
  } catch (const CaptureError&) {
    thrown = true;
  }
  CHECK(thrown);
  f.device->captures = false;
  f.device->spoilt_graph = false;
  f.all_reduce(*comm, ticket);
  comm->join(ticket);
  CHECK_EQ(error_of([&] { comm->check(); }), "");
}

}  // namespace
}  // namespace torchddp::gpu
