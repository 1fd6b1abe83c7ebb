// The NCCL communicator with a table that records its calls: order, streams, timeouts, errors and graphs.
#include <array>
#include "gpu/nccl.h"

#include "gpu_fixture.h"

namespace torchddp::gpu {
namespace {

TEST(gpu_an_operation_is_queued_between_events) {
  Fixture f;
  {
    const auto comm = f.make();
    f.diary.take();
    f.device->idle = false;
    Ticket ticket;
    f.all_reduce(*comm, ticket);
    // s1 is the compute stream, s2 the communicator's; e1 is the fork event.
    CHECK(f.diary.take() == (Lines{"record e1 s1", "s2 waits e1", "all_reduce 8 s2", "record e2 s2"}));
    CHECK(!comm->ended(ticket));
    f.device->current = 5;  // the joining stream
    comm->join(ticket);
    CHECK(f.diary.take() == (Lines{"s5 waits e2"}));
    f.device->idle = true;
    CHECK(comm->ended(ticket));
  }
  CHECK(f.diary.take() == (Lines{"finalize", "destroy"}));
  CHECK_EQ(f.device->alive.load(), 0);
}

TEST(gpu_operations_under_way_have_events_of_their_own_which_come_back) {
  Fixture f;
  f.config.watch_interval = 10min;
  const auto comm = f.make();
  f.device->idle = false;
  std::array<Ticket, 3> tickets;
  for (auto& ticket : tickets) f.all_reduce(*comm, ticket);
  f.diary.take();
  comm->join(tickets[2]);
  comm->join(tickets[0]);
  CHECK(f.diary.take() == (Lines{"s1 waits e4", "s1 waits e2"}));
  f.device->idle = true;
  Ticket next;
  f.all_reduce(*comm, next);  // recycles two
  CHECK_EQ(f.diary.count("record e3 s2"), 1);
  f.diary.take();
  comm->join(tickets[0]);  // was recycled: nothing to wait for
  CHECK(f.diary.take().empty());
  const auto events = f.device->alive.load();
  for (int i = 0; i < 100; ++i) {
    f.all_reduce(*comm, next);
    comm->join(next);
  }
  CHECK_EQ(f.device->alive.load(), events);
}

TEST(gpu_what_an_operation_uses_goes_when_it_is_joined) {
  Joined f;
  f.device->idle = false;
  auto memory = std::make_shared<int>(3);
  const std::weak_ptr<int> alive = memory;
  f.all_reduce(8, 0, std::move(memory));
  CHECK(!alive.expired());
  f.diary.take();
  f.comm->join(f.ticket);  // work queued after this wait may use the memory
  CHECK(f.diary.take() == (Lines{"s1 waits e2"}));
  CHECK(alive.expired());
  f.comm->join(f.ticket);
  f.device->idle = true;
}

TEST(gpu_what_an_abandoned_operation_uses_lives_until_the_device_is_done) {
  Joined f;
  f.device->idle = false;
  auto memory = std::make_shared<int>(3);
  const std::weak_ptr<int> alive = memory;
  Ticket abandoned;
  Ticket next;
  f.all_reduce(*f.comm, abandoned, 8, 0, std::move(memory));
  std::this_thread::sleep_for(20ms);
  CHECK(!alive.expired());
  f.device->idle = true;
  // Freed at the next call, not on the watchdog's thread.
  CHECK(soon([&] {
    f.all_reduce(*f.comm, next);
    f.comm->join(next);
    return alive.expired();
  }));
}

TEST(gpu_an_operation_in_a_graph_is_joined_by_its_own_event_and_not_watched) {
  Joined f;
  f.timeout = kLimit;
  f.device->captures = true;
  f.device->idle = false;  // a query never reports a graph's event as finished
  f.diary.take();
  f.all_reduce();
  f.comm->join(f.ticket);
  CHECK(f.diary.take() == (Lines{"record e1 s1", "s2 waits e1", "all_reduce 8 s2", "record e2 s2", "s1 waits e2"}));
  CHECK(f.comm->ended(f.ticket));
  std::this_thread::sleep_for(kLimit + 30ms);
  CHECK_EQ(error_of([&] { f.comm->check(); }), "");
  const auto alive = f.device->alive.load();
  f.all_reduce();  // the same event again
  CHECK_EQ(f.device->alive.load(), alive);
  f.comm->forget(f.ticket);
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

// NCCL connects at the first operation of a kind, which waits for a peer that is still compiling for at most the operation timeout.
TEST(gpu_a_peer_that_is_late_for_the_first_call_has_the_time_of_an_operation) {
  Fixture f;
  f.config.connect_timeout = kLimit;
  const auto comm = f.make();
  f.nccl->connect_hangs = true;
  Ticket ticket;
  Caller caller([&] { f.all_reduce(*comm, ticket); });
  CHECK(soon([&] { return f.nccl->inside == 1; }));
  std::this_thread::sleep_for(kLimit + 30ms);
  CHECK_EQ(f.nccl->inside.load(), 1);
  f.nccl->let_go(f.nccl->connect_hangs);
  CHECK_EQ(caller.end(), "");
  comm->join(ticket);
}

TEST(gpu_a_call_that_stays_in_progress_runs_into_the_time_limit) {
  Joined f;
  f.timeout = 20ms;
  f.nccl->call_result = kNcclInProgress;
  f.nccl->async = kNcclInProgress;
  const auto message = error_of([&] { f.all_reduce(8, 2); });
  CHECK(has(message, {"rank 1 of 4", "all_reduce of 8 elements (bucket 2)", "did not start within 20 ms"}));
  f.nccl->async = kNcclSuccess;
  f.check_aborts_once();
}

// The abort releases it.
TEST(gpu_a_call_that_is_stuck_inside_runs_into_the_time_limit) {
  Joined f;
  f.nccl->connect_hangs = true;
  f.timeout = 20ms;
  Ticket stuck;
  CHECK(has(error_of([&] { f.all_reduce(*f.comm, stuck, 8, 2); }),
            {"rank 1 of 4", "all_reduce of 8 elements (bucket 2)", "did not start within 20 ms"}));
  CHECK(has(error_of([&] { f.comm->check(); }), {"bucket 2"}));
  CHECK_EQ(f.diary.count("abort"), 1);
  f.comm.reset();
  CHECK(!f.nccl->used_after_abort);
  CHECK_EQ(f.device->alive.load(), 0);
}

TEST(gpu_a_group_that_is_stuck_leaves_an_aborted_communicator_alone) {
  Joined f;
  f.nccl->connect_hangs = true;
  std::array<Memory, 1> others{{{&f, 8}}};
  const auto message = error_of([&] {
    f.comm->start(
        f.ticket, {"all_reduce", 8, 2, kLimit},
        [&](Comm handle, Stream stream) {
          return all_reduce_together(*f.nccl, handle, stream, kernels::DType::kF32, {&f, 4}, others, 0.25, 4);
        },
        nullptr);
  });
  CHECK(has(message, {"rank 1 of 4", "(bucket 2)", "did not start within 1000 ms"}));
  CHECK_EQ(f.diary.count("group end"), 1);
  CHECK(!f.nccl->used_after_abort);
}

TEST(gpu_an_operation_that_does_not_end_breaks_the_communicator) {
  Joined f;
  f.timeout = kLimit;
  f.device->idle = false;
  f.all_reduce(1000, 3);
  f.comm->join(f.ticket);  // queues a wait; neither blocks nor throws
  f.check_aborts_once();
  const auto message = error_of([&] { f.comm->check(); });
  CHECK(has(message, {"rank 1 of 4", "all_reduce of 1000 elements (bucket 3)", "1000 ms", "aborted"}));
  CHECK_EQ(error_of([&] { f.comm->join(f.ticket); }), message);
  CHECK_EQ(error_of([&] { f.all_reduce(); }), message);
  CHECK(f.comm->ended(f.ticket));
  f.comm.reset();
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
  std::this_thread::sleep_for(30ms);  // the watchdog polls
  CHECK_EQ(error_of([&] { comm->check(); }), "");
  f.device->idle = true;
}

TEST(gpu_time_counts_from_the_end_of_the_operation_before) {
  Joined f;
  f.timeout = 2 * kLimit;
  std::array<Ticket, 2> tickets;
  for (int i = 0; i < 5; ++i) {  // longer than the limit in total, but none by itself
    f.device->idle = false;
    f.all_reduce(*f.comm, tickets[0]);
    std::this_thread::sleep_for(kLimit / 2);
    const int before = f.device->seen_idle;
    f.device->idle = true;
    CHECK(soon([&] { return f.device->seen_idle > before; }));
  }
  CHECK_EQ(error_of([&] { f.comm->check(); }), "");
}

TEST(gpu_an_asynchronous_error_breaks_the_communicator) {
  Joined f;
  f.device->idle = false;
  f.all_reduce(10, 1);
  f.nccl->async = 6;
  f.check_aborts_once();
  CHECK(has(error_of([&] { f.comm->check(); }),
            {"rank 1 of 4", "error 6", "during all_reduce of 10 elements (bucket 1)"}));
}

TEST(gpu_a_call_that_fails_breaks_the_communicator_at_once) {
  Joined f;
  f.nccl->call_result = 5;
  CHECK(has(error_of([&] { f.all_reduce(); }), {"all_reduce of 8 elements failed", "error 5"}));
  f.nccl->call_result = kNcclSuccess;
  CHECK(has(error_of([&] { f.all_reduce(); }), {"error 5"}));
  f.check_aborts_once();
}

TEST(gpu_a_device_that_fails_is_a_transport_error) {
  Joined f;
  f.device->broken = true;
  CHECK(has(error_of([&] { f.all_reduce(); }), {"could not be queued", "fallen off the bus"}));
}

TEST(gpu_a_communicator_in_a_graph_is_left_behind) {
  Joined f;
  f.device->captures = true;
  f.all_reduce();
  f.comm->join(f.ticket);
  f.comm->forget(f.ticket);
  f.device->captures = false;
  f.diary.take();
  f.comm.reset();  // NCCL's own shutdown would wait for the graph
  CHECK_EQ(f.diary.count("finalize") + f.diary.count("destroy") + f.diary.count("abort"), 0);
  CHECK_EQ(f.device->alive.load(), 0);
}

// During graph replays nothing is in flight and nothing calls the communicator.
TEST(gpu_errors_are_looked_for_once_something_was_captured) {
  Joined f;
  std::this_thread::sleep_for(20ms);
  CHECK_EQ(f.nccl->asked.load(), 0);
  f.device->captures = true;
  f.all_reduce();
  f.comm->join(f.ticket);
  f.device->captures = false;
  CHECK(soon([&] { return f.nccl->asked > 2; }));
  const testing::StderrInto captured;
  f.nccl->async = 6;
  f.check_aborts_once();
  CHECK(has(captured.text(), {"torchddp: rank 1 of 4: NCCL reports: error 6"}));
  CHECK(has(error_of([&] { f.comm->check(); }), {"error 6"}));
  CHECK(has(error_of([&] { f.all_reduce(); }), {"error 6"}));
  f.comm->forget(f.ticket);
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
  Joined f;
  f.device->captures = true;
  f.device->spoilt_graph = true;
  CHECK_THROWS(CaptureError, f.all_reduce(), "the graph is spoilt");
  f.device->captures = false;
  f.device->spoilt_graph = false;
  f.all_reduce();
  f.comm->join(f.ticket);
  CHECK_EQ(error_of([&] { f.comm->check(); }), "");
}

}  // namespace
}  // namespace torchddp::gpu
