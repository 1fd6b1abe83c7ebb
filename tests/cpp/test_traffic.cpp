// Bytes of operations: closed forms for networks, the counter, and shared memory.
#include "shm_ranks.h"
#include "transport/traffic.h"

namespace torchddp::transport {
namespace {

TEST(traffic_of_a_network_has_a_closed_form) {
  for (const int size : {1, 2, 3, 4, 7}) {
    const int64_t bytes = 840 * 4;  // divisible by all world sizes
    CHECK_EQ(all_reduce_bytes(bytes, size) * size, 2 * (size - 1) * bytes);
    CHECK_EQ(one_way_bytes(bytes, size) * size, (size - 1) * bytes);
    CHECK_EQ(2 * one_way_bytes(bytes, size), all_reduce_bytes(bytes, size));
  }
  CHECK_EQ(all_reduce_bytes(int64_t{1} << 50, 64), (int64_t{1} << 50) / 64 * 126);
  CHECK_EQ(reduce_bytes(100, true), 0);
  CHECK_EQ(reduce_bytes(100, false), 100);
}

TEST(traffic_is_counted_by_route) {
  TrafficCounter counter;
  CHECK(counter.read() == Traffic{});
  counter.add(Route::kShm, 100, 60);
  const auto before = counter.read();
  counter.add(Route::kShm, 10, 5);
  counter.add(Route::kOuter, 7, 3);
  Traffic more;
  more[Route::kShm] = {10, 5};
  more[Route::kOuter] = {7, 3};
  CHECK(counter.read() - before == more);
  auto sum = before;
  sum += more;
  CHECK(sum == counter.read());
  CHECK_EQ(counter.read()[Route::kShm].payload_bytes, 110);
  CHECK_EQ(counter.read()[Route::kC10d].wire_bytes, 0);
}

}  // namespace
}  // namespace torchddp::transport

namespace torchddp::shm {
namespace {

using kernels::DType;

class NoLink final : public OuterLink {
 public:
  void start(void*, DType, int64_t, std::optional<DType>) override {}
  bool finish_oldest() override { return true; }
};

// The traffic of a host's ranks, by rank.
std::vector<Moved> moved_by_ranks(int size, const Operation& operation, int owners, bool spans) {
  Host host(size);
  NoLink link;
  std::vector<Moved> result;
  for (int rank = 0; rank < size; ++rank) {
    auto config = host.config(rank);
    config.owners = owners;
    config.outer = spans ? &link : nullptr;
    result.push_back(moved(operation, Board(config)));
  }
  return result;
}

int64_t total_bytes(const std::vector<Moved>& ranks) {
  int64_t total = 0;
  for (const auto& rank : ranks) total += rank.bytes;
  return total;
}

TEST(traffic_of_shared_memory_large_all_reduce) {
  for (const int size : {1, 2, 3, 4}) {
    for (const int64_t numel : {int64_t{128} * 3 * 4 * 100, int64_t{50'003}}) {
      for (const bool spans : {false, true}) {
        const auto ranks = moved_by_ranks(size, {.numel = numel}, size, spans);
        // Each element is read once from every other rank, and its sum is written once to each.
        CHECK_EQ(total_bytes(ranks), 2 * (size - 1) * numel * 4);
        int64_t outer = 0;
        for (const auto& rank : ranks) outer += rank.outer_numel;
        CHECK_EQ(outer, spans ? numel : 0);
        if (numel % (128 * size) == 0) CHECK_EQ(ranks[0].bytes, 2 * (size - 1) * numel * 4 / size);
      }
    }
  }
}

TEST(traffic_of_shared_memory_is_the_owners) {
  const auto ranks = moved_by_ranks(3, {.numel = 50'000}, 2, true);
  CHECK_EQ(ranks[2].bytes, 0);
  CHECK_EQ(ranks[2].outer_numel, 0);
  CHECK_EQ(ranks[0].outer_numel + ranks[1].outer_numel, 50'000);
}

TEST(traffic_of_shared_memory_by_kind) {
  const int64_t numel = 24;
  const auto of = [&](OpKind kind) {
    std::vector<int64_t> bytes;
    for (const auto& rank : moved_by_ranks(3, {.kind = kind, .root = 1, .numel = numel}, 3, false)) {
      bytes.push_back(rank.bytes);
    }
    return bytes;
  };
  const auto whole = numel * 4;
  using Expected = std::vector<int64_t>;
  CHECK(of(OpKind::kAllReduce) == Expected({2 * whole, 2 * whole, 2 * whole}));  // small: every rank sums everything
  CHECK(of(OpKind::kReduce) == Expected({0, 2 * whole, 0}));
  CHECK(of(OpKind::kBroadcast) == Expected({whole, 0, whole}));
  CHECK(of(OpKind::kAllGather) == Expected({2 * whole, 2 * whole, 2 * whole}));
  CHECK(of(OpKind::kReduceScatter) == Expected({2 * whole / 3, 2 * whole / 3, 2 * whole / 3}));
}

}  // namespace
}  // namespace torchddp::shm
