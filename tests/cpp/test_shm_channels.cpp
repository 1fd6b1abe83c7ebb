// Engines that share the segments of a mesh (Note [Channels] in mesh.h).
#include "shm/errors.h"
#include "shm_mesh_ranks.h"

namespace torchddp::shm {
namespace {

constexpr int kSize = 3;

struct Meshes {
  Meshes() : meshes(kSize) {
    Ranks ranks(kSize);
    std::vector<std::vector<Peer>> peers(kSize);
    check_ranks(kSize, [&](int rank) { peers[static_cast<size_t>(rank)] = ranks.connect(rank); });
    for (size_t rank = 0; rank < kSize; ++rank) {
      std::shared_ptr<Segment> segment = std::move(ranks.segments[rank]);
      meshes[rank] =
          std::make_shared<Mesh>(ranks.addresses[0], static_cast<int>(rank), segment, std::move(peers[rank]));
    }
  }
  Mesh& of(int rank) { return *meshes[static_cast<size_t>(rank)]; }
  int64_t taken(int rank) { return of(rank).segment()->taken_bytes(); }

  std::vector<ChannelEnd> open() {
    std::vector<ChannelEnd> ends;
    for (const auto& mesh : meshes) ends.push_back(*mesh->open());
    return ends;
  }

  std::vector<std::shared_ptr<Mesh>> meshes;
};

// The engines of one channel.
struct Channel {
  explicit Channel(Meshes& meshes) : meshes_(meshes), ends(meshes.open()) {
    for (int rank = 0; rank < kSize; ++rank) {
      EngineConfig config;
      config.rank = rank;
      config.segments = meshes.of(rank).view(ends);
      config.group_ranks = {0, 1, 2};
      config.gone = [&meshes, rank](int peer) { return meshes.of(rank).gone(peer); };
      config.timeout = kPatience;
      config.owners = kSize;
      engines.push_back(std::make_unique<Engine>(std::move(config)));
    }
  }
  // The sum of rank + 1 over all ranks, in the segment, so that peers read and write there.
  void sum(int rank) {
    constexpr int64_t kNumel = 30'000;
    auto& segment = *meshes_.of(rank).segment();
    auto* values = static_cast<float*>(segment.allocate(kNumel * 4));
    std::fill_n(values, kNumel, static_cast<float>(rank + 1));
    auto& engine = *engines[static_cast<size_t>(rank)];
    engine.wait(engine.start({.numel = kNumel, .input = values, .output = values}), kPatience);
    require(std::all_of(values, values + kNumel, [](float value) { return value == 6; }), "the sum");
    segment.release(values);
  }
  void close(int rank, std::shared_ptr<void> kept = nullptr, bool forever = false) {
    engines[static_cast<size_t>(rank)] = nullptr;
    meshes_.of(rank).close(ends, std::move(kept), forever);
  }

  Meshes& meshes_;
  std::vector<ChannelEnd> ends;
  std::vector<std::unique_ptr<Engine>> engines;
};

TEST(shm_channels_have_an_order_of_their_own) {
  Meshes meshes;
  const int before = open_files();
  Channel first(meshes), second(meshes);
  CHECK_EQ(open_files(), before);
  check_ranks(kSize, [&](int rank) {
    std::thread other([&] { (rank == 0 ? first : second).sum(rank); });  // at the same time, and in any order
    (rank == 0 ? second : first).sum(rank);
    other.join();
  });
}

TEST(shm_channels_fail_alone) {
  Meshes meshes;
  Channel first(meshes), second(meshes);
  first.engines[1]->interrupt("enough");
  const auto errors = run_ranks(kSize, [&](int rank) { first.sum(rank); });
  for (const auto& error : errors) CHECK(!error.empty());
  check_ranks(kSize, [&](int rank) { second.sum(rank); });
}

TEST(shm_channels_keep_memory_until_all_ranks_have_closed_them) {
  Meshes meshes;
  Channel first(meshes);
  auto second = std::make_unique<Channel>(meshes);
  const auto with_two = meshes.taken(0);
  auto kept = std::make_shared<int>(0), always = std::make_shared<int>(0);
  second->close(0, kept);
  second->close(1);
  meshes.of(0).drop(*meshes.of(0).open());
  CHECK_EQ(meshes.taken(0), with_two);
  CHECK_EQ(kept.use_count(), 2);
  second->close(2);
  meshes.of(0).drop(*meshes.of(0).open());
  CHECK(meshes.taken(0) < with_two);
  CHECK_EQ(kept.use_count(), 1);
  for (int rank = 0; rank < kSize; ++rank) first.close(rank, always, true);  // others than the ranks may write to it
  meshes.of(0).drop(*meshes.of(0).open());
  CHECK_EQ(always.use_count(), 4);
}

TEST(shm_channels_keep_pages_that_peers_may_read_when_the_mesh_is_gone) {
  for (const bool all_closed : {false, true}) {
    Meshes meshes;
    Channel channel(meshes);
    const auto segment = meshes.of(0).segment();
    constexpr int64_t kBytes = 1 << 20;
    auto* memory = static_cast<char*>(segment->allocate(kBytes));
    std::fill_n(memory, kBytes, 'x');
    const auto offset = segment->offset_of(memory);
    channel.close(0, std::shared_ptr<void>(memory, [segment](void* kept) { segment->release(kept); }));
    for (int rank = 1; rank < kSize; ++rank) {
      if (all_closed) channel.close(rank);
    }
    const char* seen = reinterpret_cast<const char*>(meshes.of(1).view(channel.ends)[0].base) + offset;
    meshes.meshes[0] = nullptr;
    CHECK_EQ(std::count(seen, seen + kBytes, 'x'), all_closed ? 0 : kBytes);
  }
}

TEST(shm_channels_of_peers_are_checked) {
  Meshes meshes;
  const auto bytes = meshes.of(1).segment()->bytes();
  for (const ChannelEnd& end :
       {ChannelEnd{0, -64}, ChannelEnd{0, 64}, ChannelEnd{0, kDataOffset + 1}, ChannelEnd{0, bytes - kDataOffset + 64},
        ChannelEnd{-1, 0}, ChannelEnd{kMaxChannels, 0}}) {
    auto ends = meshes.open();
    ends[1] = end;
    CHECK_THROWS(Unavailable, meshes.of(0).view(ends), "the channel of local rank 1 is not in its segment");
  }
}

}  // namespace
}  // namespace torchddp::shm
