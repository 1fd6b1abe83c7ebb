// The lifetime of a communicator: creation, interrupts, aborts, shutdown, forks, signal handlers.
#include <sys/wait.h>
#include <unistd.h>

#include "common/signals.h"
#include "gpu/ready_clock.h"

#include "gpu_fixture.h"

namespace torchddp::gpu {
namespace {

struct Raised final : std::runtime_error, SignalInterrupt {
  using std::runtime_error::runtime_error;
};

TEST(gpu_an_interrupt_aborts_and_every_later_call_says_why) {
  Joined f;
  f.device->idle = false;
  f.all_reduce();
  f.comm->interrupt("rank 3 failed");
  f.comm->interrupt("a second reason");
  f.check_aborts_once();
  CHECK_EQ(error_of([&] { f.comm->check(); }), "rank 3 failed");
  CHECK_EQ(error_of([&] { f.comm->join(f.ticket); }), "rank 3 failed");
  CHECK_EQ(error_of([&] { f.all_reduce(); }), "rank 3 failed");
  f.comm.reset();
  CHECK_EQ(f.diary.count("abort"), 1);
  CHECK_EQ(f.device->alive.load(), 0);
}

TEST(gpu_an_interrupt_ends_a_call_that_is_in_progress) {
  Joined f;
  f.nccl->call_result = kNcclInProgress;
  f.nccl->in_progress = 1'000'000'000;
  Caller caller([&] { f.all_reduce(); });
  std::this_thread::sleep_for(30ms);
  f.comm->interrupt("rank 3 failed");
  CHECK_EQ(caller.end(), "rank 3 failed");
  f.nccl->in_progress = 0;
  f.check_aborts_once();
}

TEST(gpu_nobody_waits_for_a_call_that_is_stuck_inside_and_an_interrupt_ends_it) {
  Joined f;
  f.device->idle = false;
  Ticket queued;
  f.all_reduce(*f.comm, queued);
  f.nccl->connect_hangs = true;
  Ticket stuck;
  Caller caller([&] { f.all_reduce(*f.comm, stuck); });
  CHECK(soon([&] { return f.nccl->inside == 1; }));
  f.comm->check();
  f.comm->join(queued);
  CHECK(!f.comm->ended(queued));
  f.comm->interrupt("rank 3 failed");
  CHECK_EQ(caller.end(), "rank 3 failed");
  CHECK(!f.nccl->used_after_abort);
}

// An abort frees what a call uses, so it must wait for a call that is returning.
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
  f.timeout = kLimit;
  f.config.leave_timeout = 50ms;
  auto comm = f.make();
  f.device->idle = false;
  f.nccl->abort_hangs = true;
  Ticket ticket;
  f.all_reduce(*comm, ticket);
  CHECK(soon([&] { return f.diary.count("abort") == 1; }));
  CHECK(has(error_of([&] { comm->check(); }), {"did not finish"}));
  comm.reset();
  f.device.reset();  // the thread that runs the abort has its own reference
  CHECK(f.ends_without(f.nccl->abort_hangs));
}

TEST(gpu_a_process_that_ends_leaves_before_its_models_go) {
  Joined f;
  f.all_reduce();
  f.diary.take();
  f.comm->leave();
  CHECK(f.diary.take() == (Lines{"finalize", "destroy"}));
  CHECK_EQ(f.device->alive.load(), 0);
  CHECK_EQ(error_of([&] { f.all_reduce(); }), "rank 1 of 4: the NCCL communicator has ended");
  CHECK_EQ(error_of([&] { f.comm->join(f.ticket); }), "rank 1 of 4: the NCCL communicator has ended");
  CHECK(f.comm->ended(f.ticket));
  f.comm.reset();
  CHECK(f.diary.take().empty());
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
  CHECK_EQ(f.diary.count("synchronize e2"), 1);  // it may still write to its memory
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
  comm.reset();
  CHECK(f.ends_without(f.nccl->abort_hangs));
}

// A child has neither the watchdog nor a driver, and locks held by other threads stay locked.
TEST(gpu_a_forked_child_drops_its_copies_and_nothing_else) {
  Joined f;
  f.device->idle = false;
  auto memory = std::make_shared<int>();
  const std::weak_ptr<int> held = memory;
  f.all_reduce(8, -1, std::move(memory));
  f.device->captures = true;
  Ticket captured;
  f.all_reduce(*f.comm, captured);
  f.device->captures = false;
  auto clock = std::make_unique<ReadyClock>(f.device, 3);
  f.nccl->connect_hangs = true;
  Caller caller([&] { f.all_reduce(); });
  CHECK(soon([&] { return f.nccl->inside == 1; }));
  f.diary.take();
  const auto events = f.device->alive.load();
  const auto child = fork();
  if (child == 0) {
    alarm(60);
    f.comm->forget(captured);
    clock.reset();
    f.comm.reset();
    _exit(f.diary.take().empty() && f.device->alive == events && !held.expired() ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  f.device->idle = true;
  f.nccl->let_go(f.nccl->connect_hangs);
  CHECK_EQ(caller.end(), "");
  f.comm->forget(captured);
  f.comm->check();
}

TEST(gpu_a_communicator_that_can_not_be_made_says_why_and_leaves_nothing) {
  Fixture f;
  f.nccl->init_result = 3;
  for (const bool refuses : {true, false}) {
    f.nccl->refuse_comm = refuses;
    CHECK(has(error_of([&] { f.make(); }), {"rank 1 of 4: could not create an NCCL communicator", "error 3"}));
  }
  f.config.connect_timeout = 20ms;
  f.nccl->init_result = kNcclInProgress;
  f.nccl->async = kNcclInProgress;
  CHECK(has(error_of([&] { f.make(); }), {"could not create an NCCL communicator within 20 ms"}));
  CHECK_EQ(f.diary.count("abort"), 2);
  CHECK_EQ(f.device->alive.load(), 0);
}

TEST(gpu_a_rank_that_waits_for_the_others_to_connect_is_left_behind) {
  Fixture f;
  f.config.connect_timeout = 20ms;
  f.nccl->init_hangs = true;
  CHECK(has(error_of([&] { f.make(); }), {"rank 1 of 4", "within 20 ms", "Some rank has not joined it"}));
  CHECK_EQ(f.diary.count("abort"), 0);  // nothing to abort yet
  CHECK(f.ends_without(f.nccl->init_hangs));
  CHECK_EQ(f.diary.count("abort"), 1);  // the communicator that arrived too late
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

// The call continues after a handler that returns, and ends if it raises.
TEST(gpu_handlers_of_signals_run_while_a_call_is_in_progress) {
  static int calls = 0;
  Joined f;
  calls = 0;
  f.nccl->call_result = kNcclInProgress;
  f.nccl->async = kNcclInProgress;
  signal_check = [] {
    if (++calls == 2) throw Raised("KeyboardInterrupt");
  };
  Ticket ticket;
  const auto raised = testing::thrown_by<Raised>([&] { f.all_reduce(*f.comm, ticket, 8, 2); });
  signal_check = nullptr;
  CHECK_EQ(raised, "KeyboardInterrupt");
  CHECK_EQ(calls, 2);
  CHECK(has(error_of([&] { f.comm->check(); }), {"signal handler", "all_reduce of 8 elements (bucket 2)"}));
  f.check_aborts_once();
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
  CHECK_THROWS(Raised, f.all_reduce(*made, ticket, 8, 2), "enough");
  signal_check = nullptr;
  CHECK(
      has(nested, {"rank 1 of 4", "broadcast of 3 elements", "signal handler", "all_reduce of 8 elements (bucket 2)"}));
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
  const auto raised = testing::thrown_by<Raised>([&] { f.make(); });
  signal_check = nullptr;
  CHECK_EQ(raised, "KeyboardInterrupt");
  CHECK(f.ends_without(f.nccl->init_hangs));
}

}  // namespace
}  // namespace torchddp::gpu
