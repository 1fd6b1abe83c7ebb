// Memory windows of NCCL: when memory is registered and freed, and what ranks compare.

#include "gpu_fixture.h"

namespace torchddp::gpu {
namespace {

TEST(gpu_memory_is_registered_and_given_back_where_ranks_agree) {
  Joined f;
  f.diary.take();
  auto first = f.comm->allocate(4096);
  auto second = f.comm->allocate(64);
  CHECK(f.diary.take().empty());
  CHECK(f.comm->memory_state() != 0);
  f.comm->commit_memory(1s);
  CHECK(f.diary.take() == (Lines{"register 4096", "register 64"}));
  first.reset();
  auto third = f.comm->allocate(128);
  CHECK(f.diary.take().empty());
  f.comm->memory_state();
  f.comm->commit_memory(1s);
  CHECK(f.diary.take() == (Lines{"synchronize", "deregister", "free", "register 128"}));
  third.reset();
  f.comm.reset();
  CHECK(f.diary.take() == (Lines{"finalize", "destroy", "synchronize", "free"}));
  second.reset();  // it outlived the communicator
  CHECK(f.diary.take() == (Lines{"synchronize", "free"}));
  CHECK_EQ(f.nccl->blocks.load(), 0);
}

// Two ranks' calls as NCCL gets them.
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
  CHECK(ranks.agree());  // it was freed without having been registered
  // One rank abandons a step and rebuilds its buckets.
  same[0] = ranks.comm0->allocate(4096);
  CHECK(!ranks.agree());
  same[1] = ranks.comm1->allocate(4096);
  CHECK(ranks.agree());
  ranks.commit();
  CHECK(ranks.agree());
  // Memory that one rank's program keeps.
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
  CHECK(!ranks.agree());  // equally many windows on both ranks, but at different addresses
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
  Joined f;
  auto told = f.comm->allocate(64);
  f.comm->memory_state();
  told.reset();  // freed by another thread
  const auto later = f.comm->allocate(128);
  f.diary.take();
  f.comm->commit_memory(1s);
  CHECK(f.diary.take() == (Lines{"register 64"}));
  f.comm->memory_state();
  f.comm->commit_memory(1s);
  CHECK(f.diary.take() == (Lines{"synchronize", "deregister", "free", "register 128"}));
}

// Memory held by an abandoned operation counts as freed on all ranks.
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
  Joined f;
  const auto memory = f.comm->allocate(64);
  f.comm->memory_state();
  f.nccl->async = kNcclInProgress;
  CHECK(has(error_of([&] { f.comm->commit_memory(20ms); }), {"rank 1 of 4", "registering memory", "within 20 ms"}));
}

TEST(gpu_memory_of_torch_makes_room) {
  Joined f;
  f.diary.take();
  f.nccl->allocs_that_fail = 1;
  CHECK(f.comm->allocate(123) != nullptr);
  CHECK_EQ(f.diary.count("release_cache"), 1);
  f.nccl->allocs_that_fail = 2;
  CHECK(f.comm->allocate(123) == nullptr);  // on this rank only: no error and no call
  CHECK_EQ(f.diary.count("release_cache"), 2);
  f.comm->check();
}

TEST(gpu_a_rank_alone_has_no_windows) {
  Fixture f;
  f.config.rank = 0;
  f.config.size = 1;
  CHECK(!f.make()->uses_windows());
}

TEST(gpu_an_old_library_has_no_windows) {
  Joined f;
  CHECK(f.comm->uses_windows());
  // The header that this was built with has windows, so a real old library would not load; the lower version decides.
  f.nccl->running = kWindowsVersion - 1;
  CHECK(!f.comm->uses_windows());
}

}  // namespace
}  // namespace torchddp::gpu
