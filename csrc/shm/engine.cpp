// Starting operations, and what to say when it can't go on. The work itself: engine_work.cpp; waiting for it: engine_wait.cpp.
#include "shm/engine.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "common/errors.h"
#include "common/forks.h"
#include "kernels/pack.h"
#include "shm/futex.h"

namespace torchddp::shm {
namespace {

using std::chrono::milliseconds;

// Whether the ranks have fewer processors between them than they are.
bool too_few_processors(const std::vector<SegmentView>& segments) {
  std::array<uint64_t, 16> all{};
  for (const auto& segment : segments) {
    const auto& mask = reinterpret_cast<const Header*>(segment.base)->cpu_mask;
    std::transform(all.begin(), all.end(), mask.begin(), all.begin(), std::bit_or<>());
  }
  int processors = 0;
  for (const auto word : all) {
    processors += std::popcount(word);
  }
  return processors < static_cast<int>(segments.size());
}

}  // namespace

const char* kind_name(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce:
      return "all_reduce";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kScatter:
      return "scatter";
    case OpKind::kAllToAll:
      return "all_to_all";
    case OpKind::kAllToAllSplits:
      return "all_to_all with splits";
    case OpKind::kReduce:
      return "reduce";
  }
  return "an unknown operation";
}

Engine::Engine(EngineConfig config)
    : config_(std::move(config)),
      forks_(forks()),
      crowded_(too_few_processors(config_.segments)),
      posted_(config_.segments.size(), 0),
      done_(config_.segments.size(), 0) {
  if (config_.rank < 0 || config_.rank >= size() || size() > kMaxRanks) {
    throw InternalError("a shared-memory engine for rank " + std::to_string(config_.rank) + " of " +
                        std::to_string(size()));
  }
  for (auto& op : running_) {
    op.seq = UINT64_MAX;
    op.blocks.resize(config_.segments.size());
    op.scales.resize(config_.segments.size());
    op.counted.resize(config_.segments.size());
    op.wires.resize(config_.segments.size());
  }
}

Engine::~Engine() {
  if (forks() != forks_) {
    return;  // a forked child drops its copy; the rank is still there
  }
  auto open = static_cast<uint32_t>(RankState::kOpen);
  header(config_.rank).state.compare_exchange_strong(open, static_cast<uint32_t>(RankState::kClosed));
  ring();
}

bool Engine::is_eager(const Operation& operation) const {
  return operation.bytes() <= kEagerBytes && !(config_.outer != nullptr && operation.kind == OpKind::kAllReduce);
}

std::byte* Engine::eager_data(int rank, uint64_t seq) const {
  return config_.segments[static_cast<size_t>(rank)].base + kHeaderBytes +
         static_cast<int64_t>(seq % kSlots) * kEagerBytes;
}

// The number of the next operation, whose slot is free.
uint64_t Engine::wait_for_slot(std::unique_lock<std::mutex>& lock) {
  while (next_ >= kSlots) {
    const auto seq = next_;
    auto& op = running(seq);
    wait_until(Goal::kRecyclable, op, patience(milliseconds(0), Clock::now()), lock);
    if (seq == next_) {  // no other thread has taken it meanwhile
      settle(op);
      break;
    }
  }
  return next_;
}

uint64_t Engine::start(const Operation& operation) {
  auto lock = enter();
  ensure_usable();
  if (operation.numel < 0 || operation.root < 0 || operation.root >= size()) {
    throw InternalError(std::string(kind_name(operation.kind)) + " of " + std::to_string(operation.numel) +
                        " elements with root " + std::to_string(operation.root));
  }
  const auto seq = wait_for_slot(lock);
  auto& op = running(seq);
  op.operation = operation;
  op.seq = seq;
  op.eager = is_eager(operation);
  op.next_shard = 0;
  Post post{.kind = operation.kind,
            .type = static_cast<uint32_t>(operation.type),
            .op = static_cast<uint32_t>(operation.op),
            .root = operation.root,
            .numel = operation.numel,
            .offset = 0,
            .scale = operation.scale,
            .counted = operation.non_finite != nullptr};
  const auto& mine = config_.segments[static_cast<size_t>(config_.rank)];
  if (operation.input != nullptr && op.eager) {
    std::memcpy(eager_data(config_.rank, seq), operation.input, static_cast<size_t>(operation.bytes()));
  } else if (operation.input != nullptr) {
    post.offset = static_cast<const std::byte*>(operation.input) - mine.base;
    if (post.offset < kDataOffset || post.offset + operation.bytes() > mine.bytes) {
      throw InternalError(std::string(kind_name(operation.kind)) + " of memory that is not in the shared segment");
    }
  }
  if (has_wire(op)) {
    post.wire = 1 + static_cast<uint32_t>(operation.wire);
    post.wire_offset = static_cast<const std::byte*>(operation.wire_memory) - mine.base;
    if (operation.type != kernels::DType::kF32 || post.wire_offset < kDataOffset ||
        post.wire_offset + operation.numel * kernels::item_size(operation.wire) > mine.bytes) {
      throw InternalError("only fp32 travels in 16 bits, and through the shared segment");
    }
    kernels::scale_cast(operation.wire_memory, operation.wire, operation.input, kernels::DType::kF32, operation.numel,
                        operation.scale);
  }
  auto& slot = this->slot(config_.rank, seq);
  slot.post = post;
  if (is_push(op)) {
    // Relaxed: peers read the slot after `posted`, whose store is the one that others have to wait for.
    constexpr auto kRelaxed = std::memory_order_relaxed;
    slot.non_finite.store(0, kRelaxed);
    slot.sums_not_finite.store(0, kRelaxed);
    slot.claimed.store(Tally::pack(seq, 0), kRelaxed);
    // Not this one: to a rank that still looks for the slot's last operation it says that all was written.
    slot.completed.store(Tally::pack(seq, 0), std::memory_order_release);
  }
  ++next_;
  under_way_.store(next_ - oldest_, std::memory_order_relaxed);
  header(config_.rank).posted.store(next_);
  ring();
  advance();
  update_under_way();
  return seq;
}

void Engine::progress_slow() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || is_broken() || forks() != forks_) {
    return;
  }
  advance();
  advance_outer();
  update_under_way();
}

void Engine::give_up(const std::string& reason) {
  const auto lock = enter();
  fail(reason, -1);
}

// Without the mutex, which a thread that sums may keep for long.
void Engine::interrupt(const std::string& reason) {
  if (forks() != forks_) {
    return;
  }
  {
    const std::lock_guard lock(reason_mutex_);
    if (interrupted_.load(std::memory_order_relaxed)) {
      return;
    }
    reason_ = reason;
    interrupted_.store(true, std::memory_order_release);
  }
  auto& mine = header(config_.rank);
  auto open = static_cast<uint32_t>(RankState::kOpen);
  mine.state.compare_exchange_strong(open, static_cast<uint32_t>(RankState::kFailed));
  ring();
}

// The operation is complete, so nobody counts any more. What other hosts add to a sum nobody has looked at.
void Engine::settle(Running& op) {
  if (const auto found = std::exchange(op.operation.non_finite, nullptr)) {
    const auto& mine = slot(config_.rank, op.seq);
    found->inputs.fetch_add(static_cast<int64_t>(mine.non_finite.load()));
    found->sums_finite.store(can_count(op) && !is_outer(op) && mine.sums_not_finite.load() == 0);
  }
}

void Engine::ring() {
  for (int rank = 0; rank < size(); ++rank) {
    auto& peer = header(rank);
    if (peer.sleeping.load() != 0) {  // this rank's too: other threads of it may wait for what this one has done
      peer.doorbell.fetch_add(1);
      futex_wake(peer.doorbell);
    }
  }
}

void Engine::update_under_way() {
  while (oldest_ < next_ && complete(running(oldest_))) {
    ++oldest_;
  }
  under_way_.store(next_ - oldest_, std::memory_order_relaxed);
}

void Engine::ensure_usable() {
  if (forks() != forks_) {
    throw TransportError(
        "this process is a fork of the rank that opened the shared-memory transport; it can't take its place");
  }
  if (interrupted_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(reason_mutex_);
    throw TransportError(reason_);
  }
  if (!failed_.empty()) {
    throw TransportError("the shared-memory transport is out of order since " + failed_);
  }
}

void Engine::fail(const std::string& message, int culprit) {
  failed_ = message;
  auto& mine = header(config_.rank);
  mine.culprit.store(culprit);
  mine.state.store(static_cast<uint32_t>(RankState::kFailed));
  ring();
  throw TransportError(message);
}

std::string Engine::name(int rank) const {
  return "rank " + std::to_string(config_.group_ranks[static_cast<size_t>(rank)]);
}

std::string Engine::describe(const Running& op) const {
  return std::string(kind_name(op.operation.kind)) + " of " + std::to_string(op.operation.bytes()) +
         " bytes (operation " + std::to_string(op.seq) + ")";
}

// What may differ besides kind and size.
std::string Engine::details(const Operation& operation) const {
  constexpr const char* kTypes[] = {"float64", "float32", "float16", "bfloat16", "int8",
                                    "uint8",   "int16",   "int32",   "int64"};
  constexpr const char* kOps[] = {"sum", "product", "min", "max"};
  if (operation.kind == OpKind::kAllReduce || operation.kind == OpKind::kReduceScatter ||
      operation.kind == OpKind::kReduce) {
    const bool rooted = operation.kind == OpKind::kReduce && operation.root >= 0 && operation.root < size();
    return std::string(" [") + kOps[static_cast<size_t>(operation.op)] + " of " +
           kTypes[static_cast<size_t>(operation.type)] + (rooted ? " to " + name(operation.root) : "") + "]";
  }
  if (operation.kind == OpKind::kBroadcast || operation.kind == OpKind::kScatter) {
    const bool known = operation.root >= 0 && operation.root < size();
    return " [from " + (known ? name(operation.root) : "rank " + std::to_string(operation.root)) + "]";
  }
  return "";
}

}  // namespace torchddp::shm
