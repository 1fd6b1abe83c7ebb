#include "model/world.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/errors.h"
#include "model/memory.h"

namespace torchddp::model {
namespace {

using shm::Form;
using shm::OpKind;

// Each rank's part of the arena: its segment, with places for blocks and then for headers, and memory of its own.
constexpr int64_t kRankBytes = 14 * 1024;
constexpr int64_t kSegmentBytes = 12 * 1024;
constexpr int64_t kPlaceBytes = 512;
static_assert(shm::kDataOffset + Rank::kPlaces * kPlaceBytes <= kSegmentBytes);
static_assert(kSegmentBytes + Rank::kPlaces * kPlaceBytes <= kRankBytes);
static_assert(kMaxRanks * kRankBytes < static_cast<int64_t>(kArenaBytes));

// Whether the process of a rank has ended.
shm::Atomic<uint32_t>& gone(int rank) {
  return reinterpret_cast<shm::Atomic<uint32_t>*>(arena() + kMaxRanks * kRankBytes)[rank];
}

std::byte* segment(int rank) { return arena() + rank * kRankBytes; }

shm::EngineConfig config_of(int rank, std::vector<shm::SegmentView> segments) {
  const int size = static_cast<int>(segments.size());
  shm::EngineConfig config;
  config.rank = rank;
  config.segments = std::move(segments);
  for (int peer = 0; peer < size; ++peer) config.group_ranks.push_back(10 + peer);
  config.gone = [](int peer) { return gone(peer).load() != 0; };
  config.timeout = std::chrono::seconds(1);
  config.owners = size;
  return config;
}

void connect(std::optional<shm::Mesh>& mesh, int rank, int size) {
  constexpr auto kFree = shm::kDataOffset + Rank::kPlaces * kPlaceBytes;
  auto own = std::make_shared<shm::Segment>(rank, size, segment(rank), kSegmentBytes, kFree);
  own->write_header(0);
  std::vector<shm::Peer> peers(size);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) peers[peer].segment = shm::Mapping(segment(peer), kSegmentBytes);
  }
  mesh.emplace("model", rank, std::move(own), std::move(peers));
}

void fill(float* memory, int64_t numel, const std::function<float(int64_t)>& value) {
  write(memory, numel * sizeof(float));
  for (int64_t i = 0; i < numel; ++i) memory[i] = value(i);
}

}  // namespace

float* Rank::block(int place) const {
  return reinterpret_cast<float*>(segment(rank_) + shm::kDataOffset + place * kPlaceBytes);
}
float* Rank::memory(int place) const {
  return reinterpret_cast<float*>(segment(rank_) + kSegmentBytes + place * kPlaceBytes);
}

float Rank::input(int of, int64_t i, const Place& place) const {
  if (of == place.spec.infinite && i == 0) return std::numeric_limits<float>::infinity();
  return static_cast<float>(1 + of + 4 * static_cast<int64_t>(place.number) + i % 5);
}

void Rank::start(const Spec& spec, int index) {
  auto& place = places_[index];
  place.spec = spec;
  place.number = started_++;
  shm::Operation operation;
  operation.kind = spec.kind;
  operation.root = spec.root;
  operation.numel = spec.numel;
  operation.form = spec.form;
  operation.accepts = !(spec.refused && rank_ == 0);
  auto* const own = memory(index);
  const auto value = [&](int64_t i) { return input(rank_, i, place); };
  const bool in_place = spec.kind == OpKind::kAllReduce && !engine_->is_eager(operation) && spec.form == Form::kUsual;
  const bool has_input = (spec.kind != OpKind::kBroadcast || rank_ == spec.root) && spec.form != Form::kQuestion;
  if (has_input) {
    auto* const source = engine_->is_eager(operation) ? own : block(index);
    fill(source, spec.numel, value);
    operation.input = source;
  }
  if (spec.form == Form::kEveryone) fill(own, spec.numel, value);
  operation.output = in_place ? block(index) : own;
  if (spec.kind == OpKind::kReduce && rank_ != spec.root) operation.output = nullptr;
  place.found.reset();
  if (spec.counted) operation.non_finite = {&place.found.emplace(), [](shm::NonFinite*) {}};
  place.seq = engine_->start(operation);
}

void Rank::finish(int index, std::chrono::milliseconds timeout) {
  engine_->wait(places_[index].seq, timeout);
  check(index);
}

void Rank::check(int index) {
  auto& place = places_[index];
  const auto& spec = place.spec;
  shm::Operation operation;
  operation.kind = spec.kind;
  operation.numel = spec.numel;
  const bool in_place = spec.kind == OpKind::kAllReduce && !engine_->is_eager(operation) && spec.form == Form::kUsual;
  const auto* result = in_place ? block(index) : memory(index);
  if (!is_right(place, result)) {
    scheduler().fail("wrong result: operation " + std::to_string(place.number) + " on rank " + std::to_string(rank_));
  }
  if (spec.counted) {
    const int64_t infinite = rank_ == spec.infinite ? 1 : 0;
    if (place.found->inputs.load() != infinite || place.found->sums_finite.load() != (spec.infinite < 0)) {
      scheduler().fail("wrong count of non-finite values on rank " + std::to_string(rank_));
    }
  }
  // It belongs to the rank again: who still uses it races with this.
  const auto garbage = [](int64_t) { return -1.0F; };
  fill(block(index), std::max<int64_t>(spec.numel, 1), garbage);
  const auto result_numel = spec.kind == OpKind::kAllGather ? spec.numel * size_ : spec.numel;
  fill(memory(index), std::max<int64_t>(result_numel, 1), garbage);
}

bool Rank::is_right(const Place& place, const float* result) const {
  const auto& spec = place.spec;
  if (spec.form == Form::kQuestion) return *reinterpret_cast<const bool*>(result) == !spec.refused;
  const auto sum = [&](int64_t i) {
    float total = 0;
    for (int of = 0; of < size_; ++of) total += input(of, i, place);
    return total;
  };
  const auto matches = [&](int64_t from, int64_t numel, const auto& value) {
    read(result + from, numel * sizeof(float));
    for (int64_t i = 0; i < numel; ++i) {
      if (result[from + i] != value(i)) return false;
    }
    return true;
  };
  switch (spec.kind) {
    case OpKind::kAllReduce: return matches(0, spec.numel, sum);
    case OpKind::kReduce: return rank_ != spec.root || matches(0, spec.numel, sum);
    case OpKind::kReduceScatter: {
      const auto part = spec.numel / size_;
      return matches(0, part, [&](int64_t i) { return sum(rank_ * part + i); });
    }
    case OpKind::kBroadcast:
      return rank_ == spec.root || matches(0, spec.numel, [&](int64_t i) { return input(spec.root, i, place); });
    case OpKind::kAllGather:
      for (int of = 0; of < size_; ++of) {
        if (!matches(of * spec.numel, spec.numel, [&](int64_t i) { return input(of, i, place); })) return false;
      }
      return true;
  }
  return false;
}

void World::prepare(int size, const std::vector<Thread>& threads, Fault fault) {
  size_ = size;
  fault_ = fault;
  fault_time_ = 0;
  reset_memory();
  for (int rank = 0; rank < size; ++rank) connect(ranks_[rank].mesh_, rank, size);
  for (auto& meeting : meetings_) meeting.told.emplace(0);
  for (int rank = 0; rank < size; ++rank) {
    auto& made = ranks_[rank];
    made.world_ = this;
    made.rank_ = rank;
    made.size_ = size;
    made.started_ = 0;
    made.ends_.assign(size, *made.mesh_->open());
    made.engine_.emplace(config_of(rank, made.mesh_->view(made.ends_)));
    made.threads_.emplace(static_cast<uint32_t>(
        std::ranges::count_if(threads, [&](const Thread& thread) { return thread.rank == rank; })));
  }
  ends_.assign(threads.size(), {});
  for (size_t i = 0; i < threads.size(); ++i) {
    ends_[i].rank = threads[i].rank;
    scheduler().spawn(threads[i].rank,
                      [this, i, &threads] { live(ranks_[threads[i].rank], threads[i].program, ends_[i]); });
  }
  scheduler().on_death = [this](int rank) {
    store_now(&gone(rank), sizeof(uint32_t), 1);
    fault_time_ = scheduler().now();
  };
  if (fault != Fault::kNone && fault != Fault::kDeath) scheduler().let_time_pass();
}

// A thread of a process, which ends with its last one.
void World::live(Rank& rank, const Program& program, End& end) {
  try {
    program(rank);
  } catch (const TransportError& error) {
    end.error = error.what();
  }
  if (rank.threads_->fetch_sub(1) == 1) {
    {
      const Scheduler::Unbroken unbroken(scheduler());
      rank.engine_.reset();
    }
    gone(rank.rank_).store(1);
  }
  end.is_over = true;
}

std::string World::verdict() {
  std::string result = scheduler().failure();
  for (size_t i = 0; result.empty() && i < ends_.size(); ++i) {
    if (!scheduler().is_dead(ends_[i].rank)) result = verdict_of(ends_[i]);
  }
  return result;
}

std::string World::verdict_of(const End& end) const {
  const auto of_rank = "rank " + std::to_string(10 + end.rank) + ": ";
  if (!end.is_over) return of_rank + "has not ended";
  const bool is_missed = fault_ == Fault::kSilent || (fault_ == Fault::kLeft && end.rank != 1);
  if (end.error.empty()) return is_missed ? of_rank + "did not notice that a rank is missing" : "";
  const int dead = scheduler().dead();
  std::string expected;
  if (fault_ == Fault::kInterrupted) {
    expected = end.rank == 0 ? kReason : "rank 10 gave up";
  } else if (fault_ == Fault::kLeft) {
    expected = "rank 11 ";
  } else if (fault_ == Fault::kSilent) {
    expected = end.error.starts_with("timed out") ? "timed out" : "rank 11 is missing";
  } else if (dead >= 0) {
    expected = "rank " + std::to_string(10 + dead);
  }
  if (expected.empty() || !end.error.starts_with(expected)) return of_rank + "unexpected error: " + end.error;
  constexpr int64_t kNotice = 2'000'000'000;
  if (dead >= 0 && scheduler().now() > fault_time_ + kNotice) return of_rank + "noticed too late";
  return "";
}

void World::clear() {
  for (auto& rank : ranks_) {
    rank.engine_.reset();
    rank.mesh_.reset();
  }
}

std::vector<shm::ChannelEnd> World::exchange(int rank, const shm::ChannelEnd& end) {
  auto& [ends, told] = meetings_[end.number];
  ends[rank] = end;
  told->fetch_add(1);
  scheduler().release(&told);
  // Reads the newest value: no one wakes who has missed it.
  while (told->fetch_add(0) < static_cast<uint32_t>(size_)) scheduler().wait_for(&told);
  return {ends.begin(), ends.begin() + size_};
}

bool Rank::meet_again() {
  {
    const Scheduler::Unbroken unbroken(scheduler());
    engine_.reset();
  }
  const auto reuse = [this](void*) {
    for (int place = 0; place < kPlaces; ++place) write(block(place), kPlaceBytes);
  };
  mesh_->close(ends_, std::shared_ptr<void>(this, reuse), false);
  const auto end = mesh_->open();
  if (!end) return false;
  ends_ = world_->exchange(rank_, *end);
  started_ = 0;
  engine_.emplace(config_of(rank_, mesh_->view(ends_)));
  return true;
}

}  // namespace torchddp::model
