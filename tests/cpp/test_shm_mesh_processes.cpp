// How ranks in processes connect: other users, exhausted descriptors, and deaths.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>

#include "shm/errors.h"
#include "shm/fd.h"
#include "shm_mesh_ranks.h"

namespace torchddp::shm {
namespace {

#ifndef __SANITIZE_THREAD__  // it doesn't support fork()

struct Pipe {
  Pipe() {
    std::array<int, 2> fds{};
    require(pipe2(fds.data(), O_CLOEXEC) == 0, "no pipe");
    read = Fd(fds[0]), write = Fd(fds[1]);
  }
  Fd read, write;
};

// Rank 1 of two in its own process, which runs `body` and exits with 0 if it returns true.
class Child {
 public:
  template <class Body>
  Child(const Listener& parent, const Body& body)
      : process_([&] {
          Listener listener;
          Segment segment(1, 2, 0);
          require(write(pipe_.write.get(), listener.address().data(), 32) == 32, "nobody reads");
          const auto peers = listener.connect({parent.address(), listener.address()}, 1, segment, kPatience);
          return body(peers, segment) ? 0 : 1;
        }) {
    std::array<char, 32> name{};
    require(read(pipe_.read.get(), name.data(), name.size()) == 32, "the child has no address");
    addresses = {parent.address(), std::string(name.data(), name.size())};
  }

  void kill() const { process_.kill(); }
  int end() const { return process_.end(); }

  std::vector<std::string> addresses;

 private:
  Pipe pipe_;
  Process process_;
};

EngineConfig config_of(int rank, const Segment& own, const std::vector<Peer>& peers) {
  EngineConfig config;
  config.rank = rank;
  for (const Peer& peer : peers) {
    config.segments.push_back(peer.socket ? SegmentView{peer.segment.base(), peer.segment.bytes()}
                                          : SegmentView{own.base(), own.bytes()});
  }
  config.group_ranks = {10, 11};
  config.gone = [&peers](int rank) { return peers[static_cast<size_t>(rank)].gone(); };
  config.timeout = kPatience;
  config.owners = 2;
  return config;
}

// All-reduces `numel` ones and twos; returns whether all results are threes.
bool reduce_some(Engine& engine, Segment& segment, int rounds, int64_t numel) {
  auto* block = static_cast<float*>(segment.allocate(numel * 4));
  bool good = true;
  for (int round = 0; round < rounds; ++round) {
    std::fill_n(block, numel, static_cast<float>(engine.board().rank() + 1));
    engine.wait(engine.start({.numel = numel, .input = block, .output = block}), kPatience);
    good = good && std::all_of(block, block + numel, [](float value) { return value == 3; });
  }
  segment.release(block);
  return good;
}

constexpr uid_t kNobody = 65534;

// It took the name of a rank that left: it gets neither memory nor a message.
TEST(shm_mesh_another_user_in_the_place_of_a_rank_gets_nothing) {
  const std::string name(32, 'u');
  if (geteuid() != 0) {
    CHECK(true);  // without root there is no other user
    return;
  }
  const Pipe pipe;
  const Process other([&] {
    if (setuid(kNobody) != 0) return 1;
    const auto listener = listen_at(name, 5);
    if (write(pipe.write.get(), "x", 1) != 1) return 2;
    const Fd visitor(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    std::array<char, 1000> data{};
    return recv(visitor.get(), data.data(), data.size(), 0) == 0 ? 0 : 3;
  });
  char ready = 0;
  require(read(pipe.read.get(), &ready, 1) == 1, "nobody listens");
  Listener own;
  const Segment segment(1, 2, 0);
  CHECK_THROWS(Unavailable, own.connect({name, own.address()}, 1, segment, kPatience),
               "local rank 0 runs as user 65534, this rank as 0");
  CHECK_EQ(other.end(), 0);
}

TEST(shm_mesh_without_descriptors_a_rank_blames_itself) {
  const auto message = [](int rank) {
    Ranks ranks(2);
    const Stranger waiting(ranks.addresses[0]);
    const int next = dup(0);
    close(next);
    const rlimit limit{static_cast<rlim_t>(next), static_cast<rlim_t>(next)};
    require(setrlimit(RLIMIT_NOFILE, &limit) == 0, "no limit");
    const auto said = "Too many open files in this process, which may have " + std::to_string(next) + " (ulimit -n)";
    return has(testing::thrown_by<Unavailable>([&] { ranks.connect(rank); }), {said}) ? 0 : 1;
  };
  for (const int rank : {0, 1}) CHECK_EQ(Process([&] { return message(rank); }).end(), 0);
}

// As if many ranks had sent descriptors that no rank has received yet.
TEST(shm_mesh_too_many_descriptors_under_way_are_waited_for) {
  const Process process([] {
    if (geteuid() == 0 && setuid(kNobody) != 0) return 1;  // root has no limit
    constexpr int kLimit = 100;
    const rlimit limit{kLimit, kLimit};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 2;
    std::array<int, 2> ends{};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) return 3;
    std::array<Fd, 2> pair{Fd(ends[0]), Fd(ends[1])};
    const auto say = [&] {
      const std::byte word{};
      return send_with_fd(pair[0].get(), {&word, 1}, pair[0].get());
    };
    for (int i = 0; i < 2 * kLimit && say(); ++i) {
    }
    if (say() || errno != ETOOMANYREFS) return 4;
    Ranks ranks(3);
    std::thread reader([&] {
      std::this_thread::sleep_for(milliseconds(100));
      for (auto& end : pair) end = Fd();
    });
    const auto errors = run_ranks(3, [&](int rank) { ranks.connect(rank, kPatience); });
    reader.join();
    for (const auto& error : errors) {
      if (!error.empty()) throw std::runtime_error(error);
    }
    return 0;
  });
  CHECK_EQ(process.end(), 0);
}

// What a host's processes know of each other before they connect, and their progress.
struct Crowd {
  std::atomic<int> listening, connected;
  std::atomic<bool> has_failed;
  std::array<std::array<char, 32>, kMaxRanks> names;

  void wait_for(const std::atomic<int>& count, int size) const {
    while (count.load() < size && !has_failed.load()) usleep(5'000);
  }

  void be(int rank, int size) {
    constexpr rlimit kUsual{1024, 1024};
    require(setrlimit(RLIMIT_NOFILE, &kUsual) == 0, "no limit on descriptors");
    require(geteuid() != 0 || setuid(kNobody) == 0, "root has no limit on descriptors under way");
    const auto mark = [](int of) { return static_cast<std::byte>(1 + of % 255); };
    Listener listener;
    const Segment segment(rank, size, 0);
    segment.base()[kDataOffset - 1] = mark(rank);
    std::copy_n(listener.address().begin(), 32, names[static_cast<size_t>(rank)].begin());
    listening.fetch_add(1);
    wait_for(listening, size);
    std::vector<std::string> addresses;
    for (int peer = 0; peer < size; ++peer) addresses.emplace_back(names[static_cast<size_t>(peer)].data(), 32);
    const auto peers = listener.connect(addresses, rank, segment, kPatience);
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const auto& found = peers[static_cast<size_t>(peer)];
      require(found.segment.base()[kDataOffset - 1] == mark(peer), "the segment of the peer");
      require(found.pid > 0 && !found.gone(), "the peer lives");
    }
    connected.fetch_add(1);
    wait_for(connected, size);  // a rank that leaves early counts as gone
  }
};

// Many more ranks than processors; with 127 peers each process uses most of the descriptors that it may have in flight.
TEST(shm_mesh_connects_all_ranks_of_a_large_host) {
  for (const int size : {64, 128}) {
    void* memory = mmap(nullptr, sizeof(Crowd), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    require(memory != MAP_FAILED, "no memory");
    auto& crowd = *new (memory) Crowd{};
    std::vector<std::unique_ptr<Process>> processes;
    for (int rank = 0; rank < size; ++rank) {
      processes.push_back(std::make_unique<Process>([&, rank] {
        try {
          crowd.be(rank, size);
        } catch (const std::exception&) {
          crowd.has_failed.store(true);
          throw;
        }
        return 0;
      }));
    }
    for (const auto& process : processes) CHECK_EQ(process->end(), 0);
    munmap(memory, sizeof(Crowd));
  }
}

TEST(shm_mesh_two_processes_reduce) {
  Listener listener;
  const Child child(listener, [](const std::vector<Peer>& peers, Segment& segment) {
    Engine engine(config_of(1, segment, peers));
    return reduce_some(engine, segment, 20, 100) && reduce_some(engine, segment, 20, 100'003);
  });
  Segment segment(0, 2, 0);
  const auto peers = listener.connect(child.addresses, 0, segment, kPatience);
  Engine engine(config_of(0, segment, peers));
  CHECK(reduce_some(engine, segment, 20, 100));
  CHECK(reduce_some(engine, segment, 20, 100'003));
  CHECK_EQ(child.end(), 0);
}

TEST(shm_mesh_a_process_that_exits_is_gone_at_once) {
  for (const bool is_killed : {false, true}) {
    Listener listener;
    const Pipe leave;
    const Child child(listener, [&](const std::vector<Peer>&, Segment&) {
      char word = 0;
      return read(leave.read.get(), &word, 1) == 1;
    });
    const Segment segment(0, 2, 0);
    const auto peers = listener.connect(child.addresses, 0, segment, kPatience);
    CHECK(!peers[1].gone());
    if (is_killed) {
      child.kill();
    } else {
      require(write(leave.write.get(), "x", 1) == 1, "the child has gone");
    }
    const auto since = Clock::now();
    while (!peers[1].gone() && ms_since(since) < kPatience.count()) usleep(1000);
    CHECK(peers[1].gone());
    CHECK_EQ(child.end(), is_killed ? -1 : 0);
  }
}

TEST(shm_mesh_a_process_that_is_killed_is_named) {
  for (const bool in_the_middle : {true, false}) {
    Listener listener;
    const Child child(listener, [&](const std::vector<Peer>& peers, Segment& segment) {
      Engine engine(config_of(1, segment, peers));
      do reduce_some(engine, segment, 5, 100'003);
      while (in_the_middle);
      pause();
      return true;
    });
    Segment segment(0, 2, 0);
    const auto peers = listener.connect(child.addresses, 0, segment, kPatience);
    Engine engine(config_of(0, segment, peers));
    CHECK(reduce_some(engine, segment, 5, 100'003));
    const Later killing([&] { child.kill(); });
    CHECK_THROWS(TransportError, reduce_some(engine, segment, INT32_MAX, 100'003), "rank 11 died",
                 "all_reduce of 400012 bytes");
    child.end();
  }
}

#endif

}  // namespace
}  // namespace torchddp::shm
