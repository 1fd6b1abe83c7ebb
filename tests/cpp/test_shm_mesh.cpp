// How ranks find each other: as threads, among strangers, and as processes that die.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <csignal>

#include "shm/errors.h"
#include "shm/fd_passing.h"
#include "shm_mesh_ranks.h"

namespace torchddp::shm {
namespace {

// What travels first on a connection, as mesh.cpp has it.
struct Hello {
  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  int32_t rank = 0;
  int32_t size = 0;
  std::array<char, 32> address{};
};

socklen_t address_of(const std::string& name, sockaddr_un& address) {
  address.sun_family = AF_UNIX;
  const std::string path = "torchddp-" + name;
  std::copy(path.begin(), path.end(), address.sun_path + 1);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
}

// In the place of a rank's.
Fd listen_at(const std::string& name, int backlog) {
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  const auto length = address_of(name, address);
  require(bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
              listen(socket.get(), backlog) == 0,
          "could not listen");
  return socket;
}

// Somebody who knows the name of a listener.
class Stranger {
 public:
  explicit Stranger(const std::string& address) : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un name{};
    const auto length = address_of(address, name);
    require(::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&name), length) == 0,
            "the stranger could not connect");
  }

  void send(const void* data, size_t bytes, const std::vector<int>& fds) const {
    iovec part{const_cast<void*>(data), bytes};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(4 * sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (!fds.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
      auto* rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
    }
    require(sendmsg(socket_.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes),
            "the stranger could not send");
  }

 private:
  Fd socket_;
};

Hello hello_of(int rank, int size, const std::string& address) {
  Hello hello;
  hello.rank = rank;
  hello.size = size;
  std::copy(address.begin(), address.end(), hello.address.begin());
  return hello;
}

// Connects all; each must see what the others wrote in their segments.
void check_connects(Ranks& ranks) {
  const int size = static_cast<int>(ranks.addresses.size());
  for (int rank = 0; rank < size; ++rank) {
    auto* mark = ranks.segments[static_cast<size_t>(rank)]->base() + kDataOffset - 1;
    *mark = static_cast<std::byte>(100 + rank);
  }
  std::atomic<int> finished{0};
  check_ranks(size, [&](int rank) {
    const auto peers = ranks.connect(rank);
    require(peers.size() == ranks.addresses.size(), "one entry for each rank");
    for (int peer = 0; peer < size; ++peer) {
      const auto& found = peers[static_cast<size_t>(peer)];
      require(static_cast<bool>(found.socket) == (peer != rank), "no connection to oneself");
      if (peer == rank) continue;
      require(found.pid == getpid() && !found.gone(), "the peer is this process, and it lives");
      require(found.segment.base()[kDataOffset - 1] == static_cast<std::byte>(100 + peer), "the segment of the peer");
      require(found.segment.bytes() == ranks.segments[static_cast<size_t>(peer)]->bytes(), "all of it");
    }
    finished.fetch_add(1);
    while (finished.load() < size) std::this_thread::yield();  // who leaves early is gone
  });
}

TEST(shm_mesh_connects_ranks_and_leaves_no_file_open) {
  for (const int size : {1, 2, 4}) {
    const int before = open_files();
    {
      Ranks ranks(size);
      check_connects(ranks);
    }
    CHECK_EQ(open_files(), before);
  }
}

TEST(shm_mesh_names_are_random_and_hosts_have_one) {
  const Listener first;
  const Listener second;
  CHECK_EQ(first.address().size(), 32u);
  CHECK(first.address() != second.address());
  CHECK_EQ(host_identity(), host_identity());
  CHECK(host_identity().size() > 36);
}

// Before all ranks, in the queue of the first listener and while others connect.
TEST(shm_mesh_strangers_do_no_harm) {
  const int before = open_files();
  {
    Ranks ranks(3);
    const auto& address = ranks.addresses[0];
    const auto& own = *ranks.segments[1];
    std::vector<std::unique_ptr<Stranger>> strangers;
    const auto stranger = [&]() -> Stranger& { return *strangers.emplace_back(std::make_unique<Stranger>(address)); };
    stranger();  // says nothing
    {
      const Stranger gone_at_once(address);
    }
    stranger().send("garbage", 7, {});
    const std::vector<char> long_garbage(5000, 'x');
    stranger().send(long_garbage.data(), long_garbage.size(), {});
    const Hello good = hello_of(1, 3, ranks.addresses[1]);
    stranger().send(&good, sizeof(good), {});                    // without a segment
    stranger().send(&good, sizeof(good) - 1, {own.fd()});        // cut short
    stranger().send(&good, sizeof(good), {own.fd(), own.fd()});  // with two
    stranger().send(&good, sizeof(good), {own.fd(), own.fd(), own.fd(), own.fd()});
    Hello bad = good;
    bad.magic ^= 1;
    stranger().send(&bad, sizeof(bad), {own.fd()});
    for (const int rank : {-1, 0, 3, INT32_MAX, INT32_MIN}) {
      bad = good;
      bad.rank = rank;
      stranger().send(&bad, sizeof(bad), {own.fd()});
    }
    bad = good;
    bad.address[0] = '?';  // does not know the name of the rank that it would be
    stranger().send(&bad, sizeof(bad), {own.fd()});
    const auto since = Clock::now();
    check_connects(ranks);
    CHECK(ms_since(since) < kQuickly.count());
    strangers.clear();
    ranks.listeners.clear();
    ranks.segments.clear();
    CHECK_EQ(open_files(), before);
  }
}

// What rank 0 of two says to a rank 1 that sends `hello` and `fd`. No file stays open.
std::string refusal(const std::function<void(Hello&)>& change, const std::function<int(Ranks&)>& fd) {
  const int before = open_files();
  std::string message;
  {
    Ranks ranks(2);
    const Stranger other(ranks.addresses[0]);
    auto hello = hello_of(1, 2, ranks.addresses[1]);
    change(hello);
    const Fd sent(fcntl(fd(ranks), F_DUPFD_CLOEXEC, 0));
    other.send(&hello, sizeof(hello), {sent.get()});
    try {
      ranks.connect(0, milliseconds(300));
    } catch (const Unavailable& error) {
      message = error.what();
    }
  }
  CHECK_EQ(open_files(), before);
  return message;
}

TEST(shm_mesh_a_peer_that_does_not_fit_is_refused) {
  const auto same = [](Hello&) {};
  const auto own_fd = [](Ranks& ranks) { return ranks.segments[1]->fd(); };
  CHECK_EQ(refusal(same, own_fd), "");
  CHECK(contains_all(refusal([](Hello& hello) { hello.version = 77; }, own_fd), {"speaks version 77"}));
  const auto header_of = [](Ranks& ranks) { return reinterpret_cast<Header*>(ranks.segments[1]->base()); };
  const std::vector<std::function<void(Header&)>> changes{
      [](Header& header) { header.magic = 0; },         [](Header& header) { header.version = kVersion + 1; },
      [](Header& header) { header.header_bytes = 64; }, [](Header& header) { header.segment_bytes += 1; },
      [](Header& header) { header.rank = 0; },          [](Header& header) { header.size = 3; }};
  for (const auto& change : changes) {
    const auto spoiled = [&](Ranks& ranks) {
      change(*header_of(ranks));
      return own_fd(ranks);
    };
    CHECK(contains_all(refusal(same, spoiled), {"the segment of local rank 1 has a header that is not ours"}));
  }
}

TEST(shm_mesh_a_segment_that_could_shrink_is_refused) {
  const auto same = [](Hello&) {};
  const auto refused = [&](int fd) {
    const Fd file(fd);
    require(file && ftruncate(file.get(), 64 << 20) == 0, "could not make a file");
    const auto message = refusal(same, [&](Ranks& ranks) {
      const auto& header = *reinterpret_cast<const Header*>(ranks.segments[1]->base());
      require(pwrite(file.get(), &header, sizeof(header), 0) == sizeof(header), "could not write a header");
      const int64_t bytes = 64 << 20;
      require(pwrite(file.get(), &bytes, sizeof(bytes), offsetof(Header, segment_bytes)) == sizeof(bytes),
              "nor its size");
      return file.get();
    });
    return contains_all(message, {"is no sealed segment of ours"});
  };
  CHECK(refused(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  CHECK(refused(open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)));  // what can't be sealed at all
}

TEST(shm_mesh_a_rank_that_does_not_come_is_waited_for_no_longer_than_agreed) {
  const int before = open_files();
  const auto since = Clock::now();
  {
    Ranks ranks(3);
    const Stranger silent(ranks.addresses[0]);
    CHECK_THROWS(Unavailable, ranks.connect(0, milliseconds(100)), "timed out", "2 local ranks");
  }
  {
    Ranks ranks(3);
    CHECK_THROWS(Unavailable, ranks.connect(2, milliseconds(100)), "timed out", "the segment of local rank 0");
  }
  CHECK(ms_since(since) < kQuickly.count());
  CHECK_EQ(open_files(), before);
}

TEST(shm_mesh_a_rank_that_gave_up_is_not_waited_for) {
  const auto since = Clock::now();
  {
    Ranks ranks(3);
    CHECK_THROWS(Unavailable, ranks.connect(0, milliseconds(1)), "timed out");  // which closes its socket
    CHECK_THROWS(Unavailable, ranks.connect(1, kPatience), "could not connect to local rank 0");
  }
  {
    Ranks ranks(3);
    ranks.listeners.pop_back();
    CHECK_THROWS(Unavailable, ranks.connect(0, kPatience), "local rank 2 has given up, or died");
  }
  CHECK(ms_since(since) < kQuickly.count());
}

// Somebody is always at the door: that is no reason not to look for those who will not come.
TEST(shm_mesh_a_rank_that_gave_up_is_noticed_among_many_strangers) {
  Ranks ranks(3);
  ranks.listeners.pop_back();
  std::atomic<bool> stop{false};
  std::vector<std::thread> crowd;
  for (int i = 0; i < 3; ++i) {
    crowd.emplace_back([&] {
      try {
        while (!stop.load()) const Stranger passes_by(ranks.addresses[0]);
      } catch (const std::runtime_error&) {  // nobody listens any more
      }
    });
  }
  const auto since = Clock::now();
  CHECK_THROWS(Unavailable, ranks.connect(0, 2 * kQuickly), "local rank 2 has given up, or died");
  CHECK(ms_since(since) < kQuickly.count());
  stop.store(true);
  for (auto& thread : crowd) thread.join();
}

// More than are let in at a time, and none of them ever speaks.
TEST(shm_mesh_connects_ranks_among_strangers_that_stay) {
  Ranks ranks(2);
  std::vector<std::unique_ptr<Stranger>> strangers;
  std::atomic<bool> stop{false};
  std::thread crowd([&] {
    try {
      while (!stop.load() && strangers.size() < 3 * kMaxRanks) {
        strangers.push_back(std::make_unique<Stranger>(ranks.addresses[0]));
      }
    } catch (const std::runtime_error&) {
    }
  });
  const auto since = Clock::now();
  check_ranks(2, [&](int rank) {
    if (rank == 1) std::this_thread::sleep_for(milliseconds(50));
    ranks.connect(rank, kPatience);
  });
  CHECK(ms_since(since) < kQuickly.count());
  stop.store(true);
  crowd.join();
}

// The queue of a listener is full, and nobody takes anything from it.
TEST(shm_mesh_a_rank_that_takes_nobody_is_waited_for_no_longer_than_agreed) {
  Listener own;
  const std::string name(32, 'f');
  const auto listener = listen_at(name, 0);
  std::vector<Fd> queue;
  while (true) {
    Fd next(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_un address{};
    const auto length = address_of(name, address);
    if (::connect(next.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) break;
    queue.push_back(std::move(next));
  }
  CHECK_EQ(errno, EAGAIN);
  const Segment segment(1, 2, 0);
  const auto since = Clock::now();
  CHECK_THROWS(Unavailable, own.connect({name, own.address()}, 1, segment, milliseconds(100)),
               "timed out reaching local rank 0", "too many others");
  CHECK(ms_since(since) < kQuickly.count());
}

TEST(shm_mesh_more_ranks_than_can_share_memory) {
  Listener listener;
  const Segment segment(0, 1, 0);
  const std::vector<std::string> addresses(kMaxRanks + 1, listener.address());
  CHECK_THROWS(Unavailable, listener.connect(addresses, 0, segment, milliseconds(100)), "257 ranks", "at most 256");
}

#ifndef __SANITIZE_THREAD__  // it does not know fork()

// Rank 1 of two in a process of its own. It runs `body` with an engine, then waits to be killed.
class Child {
 public:
  template <class Body>
  explicit Child(const Listener& parent, const Body& body) {
    std::array<int, 2> ends{};
    require(pipe2(ends.data(), O_CLOEXEC) == 0, "no pipe");
    const Fd read_end(ends[0]);
    Fd write_end(ends[1]);
    pid_ = fork();
    if (pid_ == 0) {
      int status = 1;
      try {
        Listener listener;
        const Segment segment(1, 2, 0);
        const std::vector<std::string> addresses{parent.address(), listener.address()};
        if (write(write_end.get(), listener.address().data(), 32) == 32) {
          const auto peers = listener.connect(addresses, 1, segment, kPatience);
          status = body(peers, segment) ? 0 : 1;
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "child: %s\n", error.what());
      }
      _exit(status);
    }
    std::array<char, 32> name{};
    require(read(read_end.get(), name.data(), name.size()) == 32, "the child has no address");
    addresses = {parent.address(), std::string(name.data(), name.size())};
  }
  ~Child() { end(); }

  void kill() const { ::kill(pid_, SIGKILL); }
  // Its exit status; -1 if it was killed.
  int end() {
    if (pid_ <= 0) return -1;
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  std::vector<std::string> addresses;

 private:
  pid_t pid_ = 0;
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

// All-reduces of `numel` ones and twos; whether all came out as threes.
bool reduce_some(Engine& engine, Segment& segment, int rounds, int64_t numel) {
  auto* block = static_cast<float*>(segment.allocate(numel * 4));
  bool good = true;
  for (int round = 0; round < rounds; ++round) {
    std::fill_n(block, numel, static_cast<float>(engine.rank() + 1));
    engine.wait(engine.start({.numel = numel, .input = block, .output = block}), kPatience);
    good = good && std::all_of(block, block + numel, [](float value) { return value == 3; });
  }
  segment.release(block);
  return good;
}

// Runs `body` in a child; its exit status is what that returns, 99 if it throws.
class Process {
 public:
  template <class Body>
  explicit Process(const Body& body) : pid_(fork()) {
    if (pid_ == 0) {
      int status = 99;
      try {
        status = body();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "child: %s\n", error.what());
      }
      _exit(status);
    }
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  int end() const {
    int status = 0;
    waitpid(pid_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_;
};

constexpr uid_t kNobody = 65534;

// It has taken the name of a rank that has gone: it gets neither memory nor a word.
TEST(shm_mesh_another_user_in_the_place_of_a_rank_gets_nothing) {
  const std::string name(32, 'u');
  if (geteuid() != 0) {
    CHECK(true);  // nobody can be somebody else
    return;
  }
  std::array<int, 2> ends{};
  require(pipe2(ends.data(), O_CLOEXEC) == 0, "no pipe");
  const Fd read_end(ends[0]);
  const Fd write_end(ends[1]);
  const Process other([&] {
    if (setuid(kNobody) != 0) return 1;
    const auto listener = listen_at(name, 5);
    if (write(write_end.get(), "x", 1) != 1) return 2;
    const Fd visitor(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    std::array<char, 1000> data{};
    return recv(visitor.get(), data.data(), data.size(), 0) == 0 ? 0 : 3;
  });
  char ready = 0;
  require(read(read_end.get(), &ready, 1) == 1, "nobody listens");
  Listener own;
  const Segment segment(1, 2, 0);
  CHECK_THROWS(Unavailable, own.connect({name, own.address()}, 1, segment, kQuickly),
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
    try {
      ranks.connect(rank, kQuickly);
    } catch (const Unavailable& error) {
      const auto said = "Too many open files in this process, which may have " + std::to_string(next) + " (ulimit -n)";
      return contains_all(error.what(), {said}) ? 0 : 1;
    }
    return 2;
  };
  for (const int rank : {0, 1}) CHECK_EQ(Process([&] { return message(rank); }).end(), 0);
}

// As if many ranks had sent theirs and nobody had read them yet.
TEST(shm_mesh_too_many_descriptors_under_way_are_waited_for) {
  const Process process([] {
    if (geteuid() == 0 && setuid(kNobody) != 0) return 1;  // root has no such limit
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
    const auto since = Clock::now();
    const auto errors = run_ranks(3, [&](int rank) { ranks.connect(rank, kPatience); });
    reader.join();
    for (const auto& error : errors) {
      if (!error.empty()) throw std::runtime_error(error);
    }
    return ms_since(since) < kQuickly.count() ? 0 : 5;
  });
  CHECK_EQ(process.end(), 0);
}

TEST(shm_mesh_two_processes_reduce) {
  Listener listener;
  Child child(listener, [](const std::vector<Peer>& peers, const Segment& segment) {
    Engine engine(config_of(1, segment, peers));
    auto& own = const_cast<Segment&>(segment);
    return reduce_some(engine, own, 20, 100) && reduce_some(engine, own, 20, 100'003);
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
    Child child(listener, [&](const std::vector<Peer>&, const Segment&) {
      if (is_killed) pause();
      usleep(50'000);
      return true;
    });
    const Segment segment(0, 2, 0);
    const auto peers = listener.connect(child.addresses, 0, segment, kPatience);
    CHECK(!peers[1].gone());
    if (is_killed) {
      child.kill();
    } else {
      usleep(60'000);
    }
    const auto since = Clock::now();
    while (!peers[1].gone() && ms_since(since) < 2 * kQuickly.count()) usleep(1000);
    CHECK(ms_since(since) < kQuickly.count());
    child.end();
  }
}

TEST(shm_mesh_a_process_that_is_killed_is_named) {
  for (const bool in_the_middle : {true, false}) {
    Listener listener;
    Child child(listener, [&](const std::vector<Peer>& peers, const Segment& segment) {
      Engine engine(config_of(1, segment, peers));
      auto& own = const_cast<Segment&>(segment);
      reduce_some(engine, own, 5, 100'003);
      while (in_the_middle) reduce_some(engine, own, 5, 100'003);
      pause();
      return true;
    });
    Segment segment(0, 2, 0);
    const auto peers = listener.connect(child.addresses, 0, segment, kPatience);
    Engine engine(config_of(0, segment, peers));
    CHECK(reduce_some(engine, segment, 5, 100'003));
    std::thread killer([&] {
      usleep(50'000);
      child.kill();
    });
    const auto since = Clock::now();
    const std::string message = error_of([&] { reduce_some(engine, segment, INT32_MAX, 100'003); });
    CHECK(ms_since(since) < kQuickly.count());
    CHECK(contains_all(message, {"rank 11 died", "all_reduce of 400012 bytes"}));
    killer.join();
    child.end();
  }
}

#endif

}  // namespace
}  // namespace torchddp::shm
