// Peers that write garbage cause a wrong result or an error, but never an out-of-bounds read or an endless wait.
#include <sys/mman.h>

#include <random>

#include "shm_ranks.h"

namespace torchddp::shm {
namespace {

// Memory between inaccessible pages.
class Guarded {
 public:
  static constexpr int64_t kBytes = (kDataOffset + 4095) / 4096 * 4096 + 256 * 1024;

  Guarded() {
    auto* all = mmap(nullptr, kBytes + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(all != MAP_FAILED, "could not map memory");
    all_ = static_cast<std::byte*>(all);
    require(mprotect(base(), kBytes, PROT_READ | PROT_WRITE) == 0, "could not open memory");
  }
  ~Guarded() { munmap(all_, kBytes + 2 * kGuard); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  std::byte* base() const { return all_ + kGuard; }
  Header& header() const { return *reinterpret_cast<Header*>(base()); }
  void reset(int rank) const {
    std::memset(base(), 0, static_cast<size_t>(kDataOffset));
    header().rank = rank;
    header().size = 2;
    header().state.store(static_cast<uint32_t>(RankState::kOpen));
  }

 private:
  static constexpr int64_t kGuard = 64 << 20;
  std::byte* all_ = nullptr;
};

constexpr int64_t kEagerNumel = 100;
constexpr int64_t kLargeNumel = 50'000;  // 200'000 bytes: four chunks
constexpr milliseconds kBriefly{15};     // for operations that may never end

// Rank 0 has an engine; rank 1 is only memory.
struct Victim {
  std::unique_ptr<Engine> engine() const {
    EngineConfig config;
    config.segments = {{own.base(), Guarded::kBytes}, {peer.base(), Guarded::kBytes}};
    config.group_ranks = {10, 11};
    config.gone = [](int) { return false; };
    config.timeout = kPatience;
    config.owners = 2;
    return std::make_unique<Engine>(std::move(config));
  }

  // The next operation of new ranks; the peer has posted what an honest one would.
  Operation operation(OpKind kind, bool eager) {
    own.reset(0);
    peer.reset(1);
    Operation operation;
    operation.kind = kind;
    operation.numel = eager ? kEagerNumel : kLargeNumel;
    operation.root = kind == OpKind::kReduce ? 0 : 1;  // the victim reads
    auto* block = own.base() + kDataOffset;
    output.resize(static_cast<size_t>(operation.bytes()) * 2);
    const bool has_input = kind != OpKind::kBroadcast;
    operation.input = has_input ? block : nullptr;
    operation.output = kind == OpKind::kAllReduce && !eager ? block : output.data();
    post(operation);
    return operation;
  }

  void post(const Operation& operation) const {
    auto& slot = peer.header().slots[0];
    fill_post(slot.post, operation, kDataOffset);
    open_chunks(slot, 0);
    slot.post.number.store(1);
    peer.header().done.store(1);
  }

  // The error's text, or "".
  std::string run(const Operation& operation, milliseconds timeout = kPatience) const {
    return error_of([&] {
      const auto victim = engine();
      victim->wait(victim->start(operation), timeout);
    });
  }

  Guarded own;
  Guarded peer;
  Bytes output;
};

TEST(shm_offsets_outside_of_a_segment_are_refused) {
  Victim victim;
  constexpr int64_t kLast = Guarded::kBytes - kLargeNumel * 4;
  for (const OpKind kind : kKinds) {
    for (const int64_t offset : {int64_t{-1}, int64_t{-4096}, INT64_MIN, int64_t{0}, kDataOffset - 1, kLast + 1,
                                 Guarded::kBytes, Guarded::kBytes + 1, INT64_MAX - kLargeNumel * 4, INT64_MAX}) {
      const auto operation = victim.operation(kind, false);
      set_location(victim.peer.header().slots[0].post, offset);
      CHECK(has(victim.run(operation), {"rank 11 offers memory that is not in its segment"}));
    }
    // The last bytes of the mapping are valid, and so is an unaligned offset.
    for (const int64_t offset : {kLast, kLast - 1, kDataOffset + 3}) {
      const auto operation = victim.operation(kind, false);
      set_location(victim.peer.header().slots[0].post, offset);
      CHECK_EQ(victim.run(operation), "");
    }
  }
}

TEST(shm_offsets_of_small_inputs_mean_nothing) {
  Victim victim;
  for (const OpKind kind : kKinds) {
    const auto operation = victim.operation(kind, true);
    set_location(victim.peer.header().slots[0].post, INT64_MIN);
    CHECK_EQ(victim.run(operation), "");
  }
}

TEST(shm_other_lengths_are_refused) {
  Victim victim;
  for (const bool eager : {true, false}) {
    for (const int64_t numel : {int64_t{-1}, INT64_MIN, int64_t{0}, int64_t{99}, INT64_MAX, INT64_MAX / 4 + 1}) {
      const auto operation = victim.operation(OpKind::kAllGather, eager);
      victim.peer.header().slots[0].post.terms.numel = numel;
      CHECK(has(victim.run(operation), {"out of step", "rank 10", "rank 11"}));
    }
    const auto operation = victim.operation(OpKind::kAllReduce, eager);
    auto& post = victim.peer.header().slots[0].post;
    post.terms.kind = static_cast<OpKind>(0xFF);
    post.terms.type = 0xFF;
    CHECK(has(victim.run(operation), {"out of step", "an unknown operation"}));
  }
}

TEST(shm_counters_of_any_value_end_in_a_result_or_an_error) {
  Victim victim;
  for (const uint64_t value : {uint64_t{0}, uint64_t{1} << 23, (uint64_t{1} << 24) - 1, uint64_t{1} << 24,
                               uint64_t{1} << 63, UINT64_MAX - 1, UINT64_MAX}) {
    for (const bool eager : {true, false}) {
      for (int which = 0; which < 8; ++which) {
        const auto operation = victim.operation(OpKind::kAllReduce, eager);
        // A peer maps this rank's segment too.
        auto& header = which % 2 == 0 ? victim.peer.header() : victim.own.header();
        auto& slot = header.slots[0];
        const std::array<std::atomic<uint64_t>*, 4> counters{&slot.post.number, &header.done, &slot.claimed,
                                                             &slot.marks};
        counters[static_cast<size_t>(which / 2)]->store(value);
        const std::string message = victim.run(operation, kBriefly);
        CHECK_EQ(message.empty() || has(message, {"timed out"}) ? "" : message, "");
      }
    }
  }
}

// Overwrite a few or many bytes of the peer's header before an operation; the rest is honest.
TEST(shm_random_bytes_in_a_header_end_in_a_result_or_an_error) {
  Victim victim;
  std::mt19937 random(20'240'607);
  int num_errors = 0;
  constexpr int kRounds = 1500;
  for (int round = 0; round < kRounds; ++round) {
    const auto operation = victim.operation(kKinds[random() % std::size(kKinds)], random() % 2 == 0);
    auto* begin = victim.peer.base();
    // Most of it is unused slots, so half of the writes go to the parts in use.
    const auto end = random() % 2 == 0 ? sizeof(Header) : offsetof(Header, slots) + sizeof(Slot);
    const auto hits = round % 10 == 0 ? 2000 : 1 + random() % 12;
    for (uint32_t i = 0; i < hits; ++i) begin[random() % end] = static_cast<std::byte>(random());
    num_errors += victim.run(operation, kBriefly).empty() ? 0 : 1;
  }
  CHECK(num_errors > 0 && num_errors < kRounds);
}

#ifndef __SANITIZE_THREAD__  // it would report all of the peer's data races

// A peer that keeps writing to its own header and the victim's.
void tamper_while_running(const std::function<void(Victim&, std::mt19937&)>& tamper, int rounds) {
  Victim victim;
  std::atomic<bool> stop{false};
  std::thread tamperer([&] {
    std::mt19937 random(99);
    while (!stop.load()) tamper(victim, random);
  });
  for (int round = 0; round < rounds; ++round) {
    const auto operation = victim.operation(kKinds[round % std::size(kKinds)], round % 4 == 0);
    victim.run(operation, kBriefly);
  }
  stop.store(true);
  tamperer.join();
  CHECK(true);  // every round ended, with a result or an error
}

TEST(shm_a_peer_that_writes_random_bytes_all_the_time) {
  tamper_while_running(
      [](Victim& victim, std::mt19937& random) {
        const auto& memory = random() % 2 == 0 ? victim.peer : victim.own;
        const auto end = random() % 2 == 0 ? sizeof(Header) : offsetof(Header, slots) + sizeof(Slot);
        const_cast<volatile std::byte*>(memory.base())[random() % end] = static_cast<std::byte>(random());
      },
      120);
}

// The work is never used up.
TEST(shm_a_peer_that_takes_back_every_claim) {
  tamper_while_running(
      [](Victim& victim, std::mt19937& /*random*/) {
        for (const Guarded* memory : {&victim.peer, &victim.own}) {
          auto& slot = memory->header().slots[0];
          slot.claimed.store(0);
          slot.marks.store(0);
        }
      },
      60);
}

#endif

}  // namespace
}  // namespace torchddp::shm
