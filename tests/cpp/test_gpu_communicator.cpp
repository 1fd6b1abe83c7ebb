// The NCCL communicator against a table that writes down its calls: order, streams, lifetimes, and every way to fail.
#include <sys/wait.h>
#include <unistd.h>

#include <memory>

#include "check.h"
#include "common/errors.h"
#include "common/signals.h"
#include "gpu/communicator.h"
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
  CommunicatorConfig config{1, 4, 10min, 2s, 2s, 1ms};

  std::unique_ptr<Communicator> make() { return std::make_unique<Communicator>(nccl, device, config, UniqueId{}); }
  void all_reduce(Communicator& comm, Ticket& ticket, int64_t numel = 8, int64_t bucket = -1,
                  std::shared_ptr<void> keep = nullptr) {
    comm.start(
        ticket, {"all_reduce", numel, bucket},
        [&](Comm handle, Stream stream) {
          return nccl->all_reduce(nullptr, nullptr, numel, kernels::DType::kF32, handle, stream);
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

TEST(gpu_what_an_operation_uses_lives_until_the_device_is_done) {
  Fixture f;
  const auto comm = f.make();
  f.device->idle = false;
  auto memory = std::make_shared<int>(3);
  const std::weak_ptr<int> alive = memory;
  Ticket ticket;
  f.all_reduce(*comm, ticket, 8, 0, std::move(memory));
  comm->join(ticket);
  std::this_thread::sleep_for(20ms);
  CHECK(!alive.expired());
  f.device->idle = true;
  // Not on the watchdog's thread: at the next call.
  CHECK(soon([&] {
    comm->join(ticket);
    return alive.expired();
  }));
}

TEST(gpu_an_operation_in_a_graph_is_joined_by_its_own_event_and_not_watched) {
  Fixture f;
  f.config.timeout = 5ms;
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

TEST(gpu_a_call_that_stays_in_progress_runs_into_the_time_limit) {
  Fixture f;
  const auto comm = f.make();
  f.nccl->call_result = kNcclInProgress;
  f.nccl->async = kNcclInProgress;
  f.config.connect_timeout = 20ms;
  const auto limited = f.make();
  Ticket ticket;
  const auto message = error_of([&] { f.all_reduce(*limited, ticket, 8, 2); });
  CHECK(has(message, {"rank 1 of 4", "all_reduce of 8 elements (bucket 2)", "20 ms"}));
  f.nccl->async = kNcclSuccess;
}

TEST(gpu_an_operation_that_does_not_end_breaks_the_communicator) {
  Fixture f;
  f.config.timeout = 20ms;
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
  f.config.timeout = f.config.connect_timeout = f.config.leave_timeout = std::chrono::milliseconds::max();
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
  f.config.timeout = 1000ms;
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

// The call holds the mutex for as long as NCCL waits for a peer.
TEST(gpu_an_interrupt_ends_a_call_that_is_in_progress) {
  Fixture f;
  f.config.connect_timeout = 60s;
  const auto comm = f.make();
  f.nccl->call_result = kNcclInProgress;
  f.nccl->in_progress = 1'000'000'000;
  std::thread interrupter([&] {
    std::this_thread::sleep_for(30ms);
    comm->interrupt("rank 3 failed");
  });
  Ticket ticket;
  CHECK_EQ(error_of([&] { f.all_reduce(*comm, ticket); }), "rank 3 failed");
  interrupter.join();
  f.nccl->in_progress = 0;
  CHECK(soon([&] { return f.diary.count("abort") == 1; }));
}

TEST(gpu_an_abort_that_hangs_holds_nobody_up) {
  Fixture f;
  f.config.timeout = 5ms;
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
  f.nccl->let_abort_go();
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
  Fixture f;
  f.config.leave_timeout = 30ms;
  auto comm = f.make();
  f.nccl->finalize_result = kNcclInProgress;
  f.nccl->async = kNcclInProgress;
  comm.reset();
  CHECK_EQ(f.diary.count("finalize"), 1);
  CHECK_EQ(f.diary.count("destroy"), 0);
  CHECK_EQ(f.diary.count("abort"), 1);
}

TEST(gpu_a_forked_child_drops_its_copy_and_nothing_else) {
  Fixture f;
  auto comm = f.make();
  auto memory = comm->allocate(64);
  Ticket ticket;
  f.all_reduce(*comm, ticket);
  f.diary.take();
  const auto child = fork();
  if (child == 0) {
    alarm(20);  // the watchdog, which is to be told and waited for, is not here
    memory.reset();
    comm.reset();
    _exit(f.diary.take().empty() ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  comm->check();
}

TEST(gpu_a_communicator_that_can_not_be_made_says_why_and_leaves_nothing) {
  Fixture f;
  f.config.connect_timeout = 20ms;
  f.nccl->init_result = 3;
  CHECK(has(error_of([&] { f.make(); }), {"making a NCCL communicator failed", "error 3"}));
  f.nccl->refuse_comm = true;
  CHECK(has(error_of([&] { f.make(); }), {"could not make a NCCL communicator", "error 3"}));
  f.nccl->refuse_comm = false;
  f.nccl->init_result = kNcclInProgress;
  f.nccl->async = kNcclInProgress;
  CHECK(has(error_of([&] { f.make(); }), {"did not get under way within 20 ms"}));
  CHECK_EQ(f.diary.count("abort"), 2);
  CHECK_EQ(f.device->alive.load(), 0);
}

TEST(gpu_a_library_older_than_the_header_is_refused) {
  Fixture f;
  f.nccl->running = 22809;
  CHECK(has(error_of([&] { f.make(); }), {"built with NCCL 2.29.7", "NCCL 2.28.9 is loaded"}));
  CHECK_EQ(version_problem(23007, 22907), "");
  CHECK_EQ(version_problem(22903, 22907), "");
  CHECK(version_problem(30100, 22907) != "");
}

TEST(gpu_memory_is_given_back_when_the_next_is_asked_for) {
  Fixture f;
  auto comm = f.make();
  f.diary.take();
  auto first = comm->allocate(4096);
  auto second = comm->allocate(64);
  CHECK(f.diary.take() == (Lines{"register", "register"}));
  first.reset();
  CHECK(f.diary.take().empty());
  auto third = comm->allocate(64);
  CHECK(f.diary.take() == (Lines{"synchronize", "deregister", "free", "register"}));
  third.reset();
  comm.reset();
  CHECK(f.diary.take() == (Lines{"finalize", "destroy", "synchronize", "free"}));
  second.reset();  // outlived the communicator
  CHECK(f.diary.take() == (Lines{"synchronize", "free"}));
  CHECK_EQ(f.nccl->blocks.load(), 0);
}

// What an operation holds on to is let go of before the next memory is registered, on all ranks alike.
TEST(gpu_memory_in_use_is_waited_for_before_the_next_is_registered) {
  Fixture f;
  f.config.watch_interval = 10min;
  const auto comm = f.make();
  auto memory = comm->allocate(4096);
  f.device->idle = false;
  Ticket ticket;
  f.all_reduce(*comm, ticket, 8, 0, std::move(memory));
  comm->join(ticket);
  CHECK_EQ(f.nccl->blocks.load(), 1);
  f.device->idle = true;
  f.diary.take();
  const auto next = comm->allocate(64);
  CHECK(f.diary.take() == (Lines{"synchronize", "deregister", "free", "register"}));
}

TEST(gpu_a_rank_alone_registers_nothing) {
  Fixture f;
  f.config.rank = 0;
  f.config.size = 1;
  const auto comm = f.make();
  f.diary.take();
  comm->allocate(4096);
  CHECK(f.diary.take().empty());
}

TEST(gpu_an_old_library_has_no_windows) {
  Fixture f;
  f.nccl->running = 22907;
  CHECK(f.make()->uses_windows());
  // Built against one that has them, so this can't be loaded; but what decides is the lower of the two.
  const auto comm = f.make();
  f.nccl->running = kWindowsVersion - 1;
  CHECK(!comm->uses_windows());
  f.diary.take();
  comm->allocate(64);
  CHECK_EQ(f.diary.count("register"), 0);
}

TEST(gpu_a_communicator_in_a_graph_is_left_behind) {
  Fixture f;
  auto comm = f.make();
  auto memory = comm->allocate(4096);
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

// A handler that returns lets the call go on, one that raises ends it. No lock is held meanwhile: tensors may be let go of.
TEST(gpu_handlers_of_signals_run_while_a_call_is_in_progress) {
  static std::shared_ptr<void> block;
  static int calls = 0;
  Fixture f;
  const auto comm = f.make();
  block = comm->allocate(64);
  calls = 0;
  f.nccl->call_result = kNcclInProgress;
  f.nccl->async = kNcclInProgress;
  f.config.connect_timeout = 30s;
  const auto patient = f.make();
  signal_check = [] {
    std::thread([] { block.reset(); }).join();
    if (++calls == 2) throw Raised("KeyboardInterrupt");
  };
  Ticket ticket;
  std::string raised;
  try {
    f.all_reduce(*patient, ticket, 8, 2);
  } catch (const Raised& error) {
    raised = error.what();
  }
  signal_check = nullptr;
  CHECK_EQ(raised, "KeyboardInterrupt");
  CHECK_EQ(calls, 2);
  CHECK(has(error_of([&] { patient->check(); }), {"handler of a signal", "all_reduce of 8 elements (bucket 2)"}));
  CHECK(soon([&] { return f.diary.count("abort") == 1; }));
  f.nccl->async = kNcclSuccess;
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

TEST(gpu_no_memory_is_a_transport_error) {
  Fixture f;
  const auto comm = f.make();
  f.nccl->alloc_result = 1;
  CHECK(has(error_of([&] { comm->allocate(123); }), {"could not allocate 123 bytes", "error 1"}));
}

}  // namespace
}  // namespace torchddp::gpu
