// Memory of which all ranks have one copy until they change it: what each sees, and whom it believes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <array>

#include "shm/errors.h"
#include "shm/fd_passing.h"
#include "shm/replicas.h"
#include "shm/sealed_file.h"
#include "shm_mesh_ranks.h"

namespace torchddp::shm {
namespace {

const int64_t kPage = sysconf(_SC_PAGESIZE);

std::byte byte_of(int value) { return static_cast<std::byte>(value); }

using Ranges = std::vector<std::pair<int64_t, int64_t>>;

// In pages.
Ranges changed_pages(const PrivateView& view) {
  Ranges pages;
  for (const auto& range : view.changed()) pages.emplace_back(range.begin / kPage, range.end / kPage);
  return pages;
}

TEST(shm_private_view_follows_the_file_but_where_it_was_changed) {
  const auto file = make_sealed_file(8 * kPage);
  CHECK(commit(file, 0, 8 * kPage));
  const Mapping shared(file.get(), 8 * kPage);
  PrivateView view(file.get(), 8 * kPage);
  const PrivateView other(file.get(), 8 * kPage);
  const auto written = [&](int64_t at, int value) {
    shared.base()[at] = byte_of(value);
    return view.base()[at] == byte_of(value) && other.base()[at] == byte_of(value);
  };
  CHECK(written(0, 1) && written(8 * kPage - 1, 2));
  CHECK(changed_pages(view).empty());
  for (const int64_t page : {1, 2, 5}) view.base()[page * kPage + 7] = byte_of(9);
  CHECK(changed_pages(view) == (Ranges{{1, 3}, {5, 6}}));
  CHECK(changed_pages(other).empty());
  CHECK(shared.base()[kPage + 7] == byte_of(0) && other.base()[kPage + 7] == byte_of(0));
  shared.base()[kPage + 8] = byte_of(3);
  CHECK(view.base()[kPage + 8] == byte_of(0));  // a page of its own, whole
  CHECK(written(3 * kPage, 4));
  CHECK(view.drop({kPage, 2 * kPage}));
  CHECK(changed_pages(view) == (Ranges{{2, 3}, {5, 6}}));
  CHECK(view.base()[kPage + 7] == byte_of(0) && view.base()[kPage + 8] == byte_of(3));
  CHECK(written(kPage + 9, 5));
}

TEST(shm_private_view_of_more_pages_than_are_asked_for_at_once) {
  const int64_t pages = 10'000;
  const auto file = make_sealed_file(pages * kPage);
  PrivateView view(file.get(), pages * kPage);
  for (const int64_t page : {0, 4095, 4096, 8191, 9999}) view.base()[page * kPage] = byte_of(1);
  CHECK(changed_pages(view) == (Ranges{{0, 1}, {4095, 4097}, {8191, 8192}, {9999, 10'000}}));
}

// Ranks whose files hold `bytes[rank]`, after the exchange.
struct Group {
  explicit Group(const std::vector<int64_t>& bytes, int64_t serial = 1) : ranks(static_cast<int>(bytes.size())) {
    const auto size = bytes.size();
    peers.resize(size);
    replicas.resize(size);
    check_ranks(static_cast<int>(size), [&](int rank) {
      const auto at = static_cast<size_t>(rank);
      peers[at] = ranks.connect(rank);
      replicas[at] = std::make_unique<Replicas>(bytes[at]);
      replicas[at]->exchange(peers[at], rank, bytes, serial, kPatience, [] {});
    });
  }
  Replicas& of(int rank) { return *replicas[static_cast<size_t>(rank)]; }

  Ranks ranks;
  std::vector<std::vector<Peer>> peers;
  std::vector<std::unique_ptr<Replicas>> replicas;
};

TEST(shm_replicas_every_rank_sees_what_the_owner_has_made) {
  const int before = open_files();
  {
    const std::vector<int64_t> bytes{3 * kPage + 1, 0, 100};
    Group group(bytes);
    for (int owner = 0; owner < 3; ++owner) {
      for (int64_t at = 0; at < bytes[static_cast<size_t>(owner)]; ++at) {
        group.of(owner).masters()[at] = byte_of(static_cast<int>(at % 97) + owner);
      }
    }
    for (int rank = 0; rank < 3; ++rank) {
      for (int owner = 0; owner < 3; ++owner) {
        CHECK_EQ(group.of(rank).bytes(owner) % kPage, 0);
        CHECK(group.of(rank).bytes(owner) >= bytes[static_cast<size_t>(owner)]);
        const auto* seen = group.of(rank).seen(owner);
        CHECK(std::equal(seen, seen + bytes[static_cast<size_t>(owner)], group.of(owner).masters()));
      }
    }
  }
  CHECK_EQ(open_files(), before);
}

TEST(shm_replicas_changes_are_published_or_gone) {
  Group group({2 * kPage, 2 * kPage});
  auto& own = group.of(0);
  auto& other = group.of(1);
  own.masters()[5] = byte_of(1);
  own.seen(0)[6] = byte_of(2);    // the owner changes what it sees
  other.seen(0)[7] = byte_of(3);  // and so does another rank
  CHECK(other.seen(0)[6] == byte_of(0) && own.seen(0)[7] == byte_of(0) && own.masters()[6] == byte_of(0));
  own.publish();
  other.publish();  // nothing: it has changed nothing of its own
  CHECK(own.masters()[6] == byte_of(2) && own.masters()[7] == byte_of(0));
  own.masters()[8] = byte_of(4);
  CHECK(own.seen(0)[8] == byte_of(0));  // its page is still its own
  for (auto* rank : {&own, &other}) {
    rank->refresh();
    CHECK(rank->seen(0)[5] == byte_of(1) && rank->seen(0)[6] == byte_of(2) && rank->seen(0)[7] == byte_of(0) &&
          rank->seen(0)[8] == byte_of(4));
  }
  own.masters()[9] = byte_of(5);
  CHECK(other.seen(0)[9] == byte_of(5) && own.seen(0)[9] == byte_of(5));
}

TEST(shm_replicas_pages_that_are_changed_at_each_step_are_copied_in_the_end) {
  Group group({kPage, kPage});
  auto& rank = group.of(1);
  int mark = 0;
  const auto is_own = [&] {
    group.of(0).masters()[1] = byte_of(++mark);
    return rank.seen(0)[1] != group.of(0).masters()[1];
  };
  for (int step = 1; step <= 30; ++step) {
    rank.seen(0)[0] = byte_of(200);
    CHECK(is_own());
    group.of(0).masters()[0] = byte_of(step);
    rank.refresh();
    CHECK(rank.seen(0)[0] == byte_of(step));
    CHECK_EQ(is_own(), step > 20);
  }
}

TEST(shm_replicas_pages_that_are_locked_are_copied) {
  Group group({kPage, kPage});
  auto& rank = group.of(1);
  CHECK_EQ(mlock(rank.seen(0), static_cast<size_t>(kPage)), 0);
  rank.seen(0)[0] = byte_of(200);
  group.of(0).masters()[0] = byte_of(1);
  rank.refresh();
  CHECK(rank.seen(0)[0] == byte_of(1));
}

// A rank 0 of two whose peer is the test.
struct Half {
  Half() : replicas(kPage) {
    std::array<int, 2> ends{};
    require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) == 0, "no sockets");
    peers.resize(2);
    peers[1].socket = Fd(ends[0]);
    other = Fd(ends[1]);
  }
  void send(std::array<int64_t, 2> words, const Fd& file) const {
    require(send_with_fd(other.get(), std::as_bytes(std::span(words)), file.get()), "could not send");
  }
  void exchange(milliseconds timeout = milliseconds(200), const std::function<void()>& keep_waiting = [] {}) {
    replicas.exchange(peers, 0, {kPage, kPage}, 7, timeout, keep_waiting);
  }

  Replicas replicas;
  std::vector<Peer> peers;
  Fd other;
};

constexpr int64_t kMagicOfParcels = 0x316c706572646474;

TEST(shm_replicas_take_only_what_fits) {
  const int before = open_files();
  {
    Half half;
    half.send({kMagicOfParcels, 6}, make_sealed_file(3 * kPage));  // of an exchange before
    half.send({kMagicOfParcels, 7}, make_sealed_file(kPage));
    half.exchange();
    CHECK_EQ(half.replicas.bytes(1), kPage);
  }
  const auto refusal = [](std::array<int64_t, 2> words, const Fd& file) {
    Half half;
    half.send(words, file);
    try {
      half.exchange();
    } catch (const Unavailable& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK_EQ(refusal({kMagicOfParcels, 7}, make_sealed_file(kPage)), "");
  CHECK(contains_all(refusal({kMagicOfParcels, 8}, make_sealed_file(kPage)), {"local rank 1", "another size"}));
  CHECK(contains_all(refusal({kMagicOfParcels, 7}, make_sealed_file(2 * kPage)), {"another size"}));
  CHECK(contains_all(refusal({kMagicOfParcels + 1, 7}, make_sealed_file(kPage)), {"not ours"}));
  const Fd unsealed(memfd_create("unsealed", MFD_CLOEXEC));
  CHECK_EQ(ftruncate(unsealed.get(), kPage), 0);
  CHECK(contains_all(refusal({kMagicOfParcels, 7}, unsealed), {"another size"}));
  {
    Half half;
    require(send(half.other.get(), "x", 1, 0) == 1, "could not send");
    CHECK_THROWS(Unavailable, half.exchange(), "local rank 1", "not ours");
  }
  {
    Half half;
    half.other = Fd();
    CHECK_THROWS(Unavailable, half.exchange(), "local rank 1");
  }
  {
    Half half;
    const auto since = Clock::now();
    CHECK_THROWS(Unavailable, half.exchange(milliseconds(150)), "in time");
    CHECK_THROWS(std::runtime_error, half.exchange(kPatience, [] { throw std::runtime_error("enough"); }), "enough");
    CHECK(ms_since(since) < kQuickly.count());
  }
  CHECK_EQ(open_files(), before + 1);
}

}  // namespace
}  // namespace torchddp::shm
