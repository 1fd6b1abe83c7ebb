// How ranks on threads connect, also among unrelated clients.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "shm/errors.h"
#include "shm_mesh_ranks.h"

namespace torchddp::shm {
namespace {

// The first message on a connection, as in mesh.cpp.
struct Hello {
  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  int32_t rank = 0;
  int32_t size = 0;
  std::array<char, 32> address{};
};

Hello hello_of(int rank, int size, const std::string& address) {
  Hello hello;
  hello.rank = rank;
  hello.size = size;
  std::copy(address.begin(), address.end(), hello.address.begin());
  return hello;
}

// Connects all ranks; each must see what the others wrote to their segments.
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
    while (finished.load() < size) std::this_thread::yield();  // a rank that leaves early counts as gone
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

// Before all ranks, in the first listener's queue, and while others connect.
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
    stranger().send(&good, sizeof(good), {});                    // no segment
    stranger().send(&good, sizeof(good) - 1, {own.fd()});        // cut short
    stranger().send(&good, sizeof(good), {own.fd(), own.fd()});  // two segments
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
    bad.address[0] = '?';  // doesn't know the name of the rank it claims to be
    stranger().send(&bad, sizeof(bad), {own.fd()});
    check_connects(ranks);
    strangers.clear();
    ranks.listeners.clear();
    ranks.segments.clear();
    CHECK_EQ(open_files(), before);
  }
}

// Rank 0's error for a rank 1 that sends `hello` and `fd`. No file stays open.
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
    message = testing::thrown_by<Unavailable>([&] { ranks.connect(0); });
  }
  CHECK_EQ(open_files(), before);
  return message;
}

TEST(shm_mesh_a_peer_that_does_not_fit_is_refused) {
  const auto same = [](Hello&) {};
  const auto own_fd = [](Ranks& ranks) { return ranks.segments[1]->fd(); };
  CHECK_EQ(refusal(same, own_fd), "");
  CHECK(has(refusal([](Hello& hello) { hello.version = 77; }, own_fd), {"speaks version 77"}));
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
    CHECK(has(refusal(same, spoiled), {"the segment of local rank 1 has an unexpected header"}));
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
    return has(message, {"is not a sealed torchddp segment"});
  };
  CHECK(refused(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  CHECK(refused(open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)));  // a file that can't be sealed
}

TEST(shm_mesh_a_rank_that_does_not_come_is_waited_for_no_longer_than_agreed) {
  const int before = open_files();
  {
    Ranks ranks(3);
    const Stranger silent(ranks.addresses[0]);
    CHECK_THROWS(Unavailable, ranks.connect(0, milliseconds(100)), "timed out", "2 local ranks");
  }
  CHECK_THROWS(Unavailable, Ranks(3).connect(2, milliseconds(100)), "timed out", "the segment of local rank 0");
  CHECK_EQ(open_files(), before);
}

TEST(shm_mesh_a_rank_that_gave_up_is_not_waited_for) {
  {
    Ranks ranks(3);
    CHECK_THROWS(Unavailable, ranks.connect(0, milliseconds(1)), "timed out");  // closes its socket
    CHECK_THROWS(Unavailable, ranks.connect(1, kPatience), "could not connect to local rank 0");
  }
  {
    Ranks ranks(3);
    ranks.listeners.pop_back();
    CHECK_THROWS(Unavailable, ranks.connect(0, kPatience), "local rank 2 gave up or died");
  }
  {
    Ranks ranks(8);
    ranks.listeners[5] = Listener();  // at another address
    CHECK_THROWS(Unavailable, ranks.connect(2, kPatience), "local rank 5 gave up or died");
  }
}

// As happens to one of too many clients that have sent nothing yet.
TEST(shm_mesh_a_rank_that_is_taken_for_a_stranger_comes_again) {
  Ranks ranks(2);
  const auto& name = ranks.addresses[0];
  ranks.listeners[0] = Listener();
  const auto listener = listen_at(name, 5);
  std::thread first([&] {
    for (const bool is_heard : {false, true}) {
      const Fd visitor(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      Hello heard;
      pollfd entry{visitor.get(), POLLIN, 0};
      poll(&entry, 1, -1);
      receive_with_fd(visitor.get(), std::as_writable_bytes(std::span(&heard, 1)));
      const auto hello = hello_of(0, 2, name);
      if (is_heard) send_with_fd(visitor.get(), std::as_bytes(std::span(&hello, 1)), ranks.segments[0]->fd());
    }
  });
  const auto peers = ranks.connect(1);
  first.join();
  CHECK_EQ(peers[0].segment.bytes(), ranks.segments[0]->bytes());
}

// Even with a constant stream of clients, ranks that gave up must be detected.
TEST(shm_mesh_a_rank_that_gave_up_is_noticed_among_many_strangers) {
  Ranks ranks(3);
  ranks.listeners.pop_back();
  std::atomic<bool> stop{false};
  std::vector<std::thread> crowd;
  for (int i = 0; i < 3; ++i) {
    crowd.emplace_back([&] {
      try {
        while (!stop.load()) const Stranger passes_by(ranks.addresses[0]);
      } catch (const std::runtime_error&) {  // the listener is closed
      }
    });
  }
  CHECK_THROWS(Unavailable, ranks.connect(0), "local rank 2 gave up or died");
  stop.store(true);
  for (auto& thread : crowd) thread.join();
}

// More clients than are accepted at a time, none of which ever sends.
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
  check_ranks(2, [&](int rank) {
    if (rank == 1) std::this_thread::sleep_for(milliseconds(50));
    ranks.connect(rank, kPatience);
  });
  stop.store(true);
  crowd.join();
}

// A listener's queue is full, and nothing accepts from it.
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
  CHECK_THROWS(Unavailable, own.connect({name, own.address()}, 1, segment, milliseconds(100)),
               "timed out reaching local rank 0", "too many connections");
}

TEST(shm_mesh_more_ranks_than_can_share_memory) {
  Listener listener;
  const Segment segment(0, 1, 0);
  const std::vector<std::string> addresses(kMaxRanks + 1, listener.address());
  CHECK_THROWS(Unavailable, listener.connect(addresses, 0, segment, milliseconds(100)), "257 ranks", "at most 256");
}

}  // namespace
}  // namespace torchddp::shm
