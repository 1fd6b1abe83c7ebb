#include "shm/operation.h"

#include <algorithm>
#include <numeric>

namespace torchddp::shm {
namespace {

// Shards begin at multiples of this many elements: whole cache lines for every type.
constexpr int64_t kShardUnit = 128;

// An owner reads the others' addends of its shard, and writes the sums to all of them.
Moved moved_by_owner(const Operation& operation, const Board& board) {
  const auto numel = shard(operation, board, board.rank()).numel();
  const auto read_item = kernels::item_size(operation.wire_memory != nullptr ? operation.wire : operation.type);
  const auto per_rank = numel * (read_item + kernels::item_size(operation.type));
  return {(board.size() - 1) * per_rank, board.spans() ? numel : 0};
}

}  // namespace

const char* kind_name(OpKind kind) {
  constexpr const char* kNames[kNumOpKinds] = {
      "all_reduce", "reduce_scatter",         "all_gather", "broadcast", "scatter",
      "all_to_all", "all_to_all with splits", "reduce",
  };
  const auto index = static_cast<size_t>(kind);
  return index < kNumOpKinds ? kNames[index] : "an unknown operation";
}

bool is_eager(const Operation& operation, const Board& board) {
  return operation.bytes() <= kEagerBytes && !(board.spans() && operation.kind == OpKind::kAllReduce);
}

Moved moved(const Operation& operation, const Board& board) {
  const auto bytes = operation.bytes();
  const int64_t others = board.size() - 1;
  const bool is_root = board.rank() == operation.root;
  switch (operation.kind) {
    case OpKind::kAllReduce:
      return is_eager(operation, board) ? Moved{others * bytes, 0} : moved_by_owner(operation, board);
    case OpKind::kReduce:
      return {is_root ? others * bytes : 0, 0};
    case OpKind::kAllGather:
      return {others * bytes, 0};
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll:
      return {others * (bytes / board.size()), 0};
    case OpKind::kBroadcast:
      return {is_root ? 0 : bytes, 0};
    case OpKind::kScatter:
      return {is_root ? 0 : bytes / board.size(), 0};
    case OpKind::kAllToAllSplits: {
      const auto& expected = operation.expected;
      const auto total = std::accumulate(expected.begin(), expected.end(), int64_t{0});
      return {expected.empty() ? 0 : total - expected[static_cast<size_t>(board.rank())], 0};
    }
  }
  return {};
}

Range shard(const Operation& operation, const Board& board, int owner) {
  const auto numel = operation.numel;
  const auto each = round_up(ceil_div(numel, board.owners()), kShardUnit);
  return {std::min(numel, owner * each), std::min(numel, (owner + 1) * each)};
}

std::string describe(const Operation& operation, uint64_t seq) {
  return std::string(kind_name(operation.kind)) + " of " + std::to_string(operation.bytes()) + " bytes (operation " +
         std::to_string(seq) + ")";
}

std::string details(const Operation& operation, const Board& board) {
  constexpr const char* kTypes[] = {"float64", "float32", "float16", "bfloat16", "int8",
                                    "uint8",   "int16",   "int32",   "int64"};
  constexpr const char* kOps[] = {"sum", "product", "min", "max"};
  const auto kind = operation.kind;
  const bool known = operation.root >= 0 && operation.root < board.size();
  if (kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter || kind == OpKind::kReduce) {
    return std::string(" [") + kOps[static_cast<size_t>(operation.op)] + " of " +
           kTypes[static_cast<size_t>(operation.type)] +
           (kind == OpKind::kReduce && known ? " to " + board.name(operation.root) : "") + "]";
  }
  if (kind == OpKind::kBroadcast || kind == OpKind::kScatter) {
    return " [from " + (known ? board.name(operation.root) : "rank " + std::to_string(operation.root)) + "]";
  }
  return "";
}

}  // namespace torchddp::shm
