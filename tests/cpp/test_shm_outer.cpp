// The all-reduce between hosts: with a fake outer link, and with one that sums between two hosts of threads.
#include <deque>
#include <map>
#include <mutex>

#include "shm_ranks.h"

namespace torchddp::shm {
namespace {

using kernels::DType;

// Adds a constant to floats after a delay.
class AddingLink final : public OuterLink {
 public:
  AddingLink(float constant, milliseconds delay) : constant_(constant), delay_(delay) {}

  void start(void* data, DType type, int64_t numel, std::optional<DType> /*sent*/) override {
    require(type == DType::kF32 && numel > 0, "only shards with elements are reduced");
    running_.push_back({static_cast<float*>(data), numel, Clock::now() + delay_});
  }
  bool finish_oldest() override {
    require(!running_.empty(), "nothing is under way between the hosts");
    const auto [data, numel, end] = running_.front();
    if (Clock::now() < end) return false;
    for (int64_t i = 0; i < numel; ++i) data[i] += constant_;
    running_.pop_front();
    return true;
  }

 private:
  struct Reduction {
    float* data;
    int64_t numel;
    Clock::time_point end;
  };
  const float constant_;
  const milliseconds delay_;
  std::deque<Reduction> running_;
};

Bytes plus(Bytes floats, float constant) {
  for (size_t at = 0; at < floats.size(); at += sizeof(float)) {
    float value = 0;
    std::memcpy(&value, &floats[at], sizeof(float));
    value += constant;
    std::memcpy(&floats[at], &value, sizeof(float));
  }
  return floats;
}

TEST(shm_the_outer_link_sees_each_element_once) {
  for (const int size : {1, 2, 3}) {
    for (const int owners : {1, size}) {
      Host host(size);
      check_ranks(size, [&](int rank) {
        AddingLink link(1000, milliseconds(rank));
        auto config = host.config(rank);
        config.outer = &link;
        config.owners = owners;
        Engine engine(std::move(config));
        for (const int64_t numel : {0, 1, 100, 2048, 50'003}) {
          const Spec spec{.numel = numel};
          Exchange exchange(host, rank, spec, engine);
          exchange.expect(plus(expected_result(spec, size, rank), 1000));
          exchange.finish(engine);
        }
      });
    }
  }
}

TEST(shm_many_outer_operations_in_flight_among_others) {
  constexpr int kSize = 3;
  Host host(kSize);
  check_ranks(kSize, [&](int rank) {
    AddingLink link(-7, milliseconds(1));
    auto config = host.config(rank);
    config.outer = &link;
    config.owners = 2;
    Engine engine(std::move(config));
    std::vector<std::unique_ptr<Exchange>> exchanges;
    for (uint32_t i = 0; i < 3 * kSlots; ++i) {
      Spec spec{.numel = 100 + 37 * i, .salt = i};
      // Runs of one kind as long as the ring: the index of outer operations must skip operations without an outer part.
      if (i / kSlots == 1) spec = {.kind = OpKind::kBroadcast, .numel = 10, .salt = i};
      exchanges.push_back(std::make_unique<Exchange>(host, rank, spec, engine));
      if (spec.kind == OpKind::kAllReduce) exchanges.back()->expect(plus(expected_result(spec, kSize, rank), -7));
    }
    for (const auto& exchange : exchanges) exchange->finish(engine);
  });
}

// Operations without an outer part fill the ring without polling the outer link.
TEST(shm_a_ring_of_small_operations_before_an_outer_one) {
  Host host(1);
  AddingLink link(5, milliseconds(0));
  auto config = host.config(0);
  config.outer = &link;
  Engine engine(std::move(config));
  for (uint32_t i = 0; i < kSlots; ++i) engine.start({.kind = OpKind::kAllGather});
  const Spec spec{.numel = 1000};
  Exchange exchange(host, 0, spec, engine);
  exchange.expect(plus(expected_result(spec, 1, 0), 5));
  exchange.finish(engine);
  CHECK(engine.poll(exchange.seq()));
}

// Where the owners of a shard on two hosts meet: the last to arrive sums in host order.
class Meeting {
 public:
  void arrive(uint64_t number, size_t host, float* data, int64_t numel) {
    const std::lock_guard lock(mutex_);
    auto& reduction = reductions_[number];
    reduction.data[host] = data;
    if (++reduction.arrived < 2) return;
    for (int64_t i = 0; i < numel; ++i) {
      reduction.data[0][i] += reduction.data[1][i];
      reduction.data[1][i] = reduction.data[0][i];
    }
  }
  bool finished(uint64_t number) {
    const std::lock_guard lock(mutex_);
    return reductions_[number].arrived == 2;
  }

 private:
  struct Reduction {
    std::array<float*, 2> data{};
    int arrived = 0;
  };
  std::mutex mutex_;
  std::map<uint64_t, Reduction> reductions_;
};

class MeetingLink final : public OuterLink {
 public:
  MeetingLink(Meeting& meeting, size_t host) : meeting_(meeting), host_(host) {}
  void start(void* data, DType /*type*/, int64_t numel, std::optional<DType> /*sent*/) override {
    meeting_.arrive(started_++, host_, static_cast<float*>(data), numel);
  }
  bool finish_oldest() override { return meeting_.finished(finished_) && (++finished_, true); }

 private:
  Meeting& meeting_;
  const size_t host_;
  uint64_t started_ = 0;
  uint64_t finished_ = 0;
};

// Sums in rank order within each host, then in host order.
Bytes two_host_sum(const std::array<int, 2>& sizes, const Spec& spec) {
  std::vector<Bytes> sums;
  for (uint32_t host = 0; host < 2; ++host) {
    Spec of_host = spec;
    of_host.salt += 1000 * host;
    sums.push_back(expected_result(of_host, sizes[host], 0));
  }
  return reduced(spec, sums);
}

void check_two_hosts(const std::array<int, 2>& sizes, int owners) {
  Host first(sizes[0]);
  Host second(sizes[1]);
  std::vector<Meeting> meetings(static_cast<size_t>(owners));
  check_ranks(sizes[0] + sizes[1], [&](int thread) {
    const uint32_t which = thread < sizes[0] ? 0 : 1;
    auto& host = which == 0 ? first : second;
    const int rank = which == 0 ? thread : thread - sizes[0];
    Meeting unused;
    MeetingLink link(rank < owners ? meetings[static_cast<size_t>(rank)] : unused, which);
    auto config = host.config(rank);
    config.outer = &link;
    config.owners = owners;
    Engine engine(std::move(config));
    std::vector<std::unique_ptr<Exchange>> exchanges;
    for (uint32_t i = 0; i < 80; ++i) {
      const Spec spec{.numel = i % 10 == 0 ? 40'003 : i * 31 % 700, .salt = i};
      Spec mine = spec;
      mine.salt += 1000 * which;
      exchanges.push_back(std::make_unique<Exchange>(host, rank, mine, engine));
      exchanges.back()->expect(two_host_sum(sizes, spec));
      if (i % 16 == 15) exchanges[i - 3]->finish(engine);
    }
    for (const auto& exchange : exchanges) exchange->finish(engine);
  });
}

TEST(shm_two_hosts_sum_with_each_other) {
  for (const int owners : {1, 2}) check_two_hosts({2, 2}, owners);
  check_two_hosts({2, 3}, 2);
  check_two_hosts({1, 3}, 1);
}

// --- and when it breaks -------------------------------------------------------------------------------------------------

// Never completes an operation.
class SilentLink : public OuterLink {
 public:
  void start(void* /*data*/, DType /*type*/, int64_t /*numel*/, std::optional<DType> /*sent*/) override {}
  bool finish_oldest() override { return false; }
};

class BrokenLink final : public SilentLink {
 public:
  explicit BrokenLink(bool at_start) : at_start_(at_start) {}
  void start(void* /*data*/, DType /*type*/, int64_t /*numel*/, std::optional<DType> /*sent*/) override {
    if (at_start_) throw TransportError("the cable is cut");
  }
  bool finish_oldest() override { throw TransportError("the cable is cut"); }

 private:
  const bool at_start_;
};

TEST(shm_a_broken_outer_link_ends_the_operation_on_all_ranks) {
  for (const bool at_start : {true, false}) {
    Host host(2);
    const auto messages = run_ranks(2, [&](int rank) {
      AddingLink good(1, milliseconds(0));
      BrokenLink broken(at_start);
      auto config = host.config(rank);
      config.outer = rank == 0 ? static_cast<OuterLink*>(&good) : &broken;
      Engine engine(std::move(config));
      try {
        run_one(host, engine, rank, {.numel = 1000});
      } catch (const TransportError&) {
        require(has(error_of([&] { engine.start({}); }), {"can't be used after that"}), "goes on");
        throw;
      }
    });
    CHECK(has(messages[0], {"rank 11", "gave up", "all_reduce of 4000 bytes"}));
    CHECK(has(messages[1], {"the all-reduce with the other hosts failed", "the cable is cut"}));
  }
}

TEST(shm_a_silent_outer_link_times_out) {
  Host host(1);
  SilentLink link;
  auto config = host.config(0);
  config.outer = &link;
  Engine engine(std::move(config));
  Exchange exchange(host, 0, {.numel = 1000}, engine);
  CHECK_THROWS(TransportError, exchange.finish(engine, milliseconds(50)), "timed out after 50 ms", "the other hosts");
}

}  // namespace
}  // namespace torchddp::shm
