#include "shm/operation.h"

#include "shm/grid.h"

namespace torchddp::shm {
namespace {

// Up to this many ranks, every rank reads every post: a single step, and no more cache lines than a chain needs.
constexpr int kFlatRanks = 4;

bool is_half(kernels::DType type) { return type == kernels::DType::kF16 || type == kernels::DType::kBF16; }

bool is_usual_sum(const Operation& operation) {
  return operation.kind == OpKind::kAllReduce && operation.form == Form::kUsual;
}

// The leader of a group reads its ranks' posts, the previous sum, and the total's location; the others read that.
int64_t read_in_chain(int64_t bytes, const Board& board) {
  const auto& groups = board.groups();
  const auto place = groups.small_of(board.rank());
  const auto& group = groups.small()[place];
  if (group.first != board.rank()) {
    return bytes;
  }
  const bool has_total = place + 1 == groups.small().size();
  return (group.size - 1 + (place > 0 ? 1 : 0) + (has_total ? 0 : 1)) * bytes;
}

// For its chunks, an owner reads its node's addends and the previous sum, and writes the sums to all ranks of the node,
// directly or by way of the last node.
Moved moved_by_owner(const Operation& operation, const Board& board) {
  const auto nodes = nodes_of(operation, board);
  const auto at = nodes.size() == 1 ? 0 : board.groups().node_of(board.rank());
  const auto& node = nodes[at];
  const auto grid = grid_of(operation, board);
  const int owners = owners_of(node, board);
  const int place = board.rank() - node.first;
  const auto numel =
      place < owners ? grid.range(grid.begin(place, owners), grid.begin(place + 1, owners)).numel() : int64_t{0};
  const auto item = kernels::item_size(operation.type);
  const auto handed_on = (at > 0 ? 1 : 0) + (at + 1 < nodes.size() ? 1 : 0);
  return {numel * (2 * (node.size - 1) + handed_on) * item, board.spans() ? numel : 0};
}

}  // namespace

const char* kind_name(OpKind kind) {
  constexpr const char* kNames[kNumOpKinds] = {
      "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
  };
  const auto index = static_cast<size_t>(kind);
  return index < kNumOpKinds ? kNames[index] : "an unknown operation";
}

bool is_eager(const Operation& operation, const Board& board) {
  if (operation.form != Form::kUsual) {
    return operation.form == Form::kQuestion;
  }
  if (operation.kind != OpKind::kAllReduce) {
    return operation.bytes() <= kEagerBytes;
  }
  // A sum of 16-bit floats that is passed on would be rounded more than once.
  const bool is_flat = board.size() <= kFlatRanks;
  const bool fits = operation.bytes() <= (is_flat ? kEagerBytes : kChainBytes);
  return fits && !board.spans() && (is_flat || !is_half(operation.type));
}

bool is_chained(const Operation& operation, const Board& board) {
  return is_usual_sum(operation) && board.size() > kFlatRanks && is_eager(operation, board);
}

bool is_chunked(const Operation& operation, const Board& board) {
  return is_usual_sum(operation) && !is_eager(operation, board);
}

bool can_count(const Operation& operation, const Board& board) {
  return is_chunked(operation, board) && operation.op == kernels::ReduceOp::kSum && kernels::is_float(operation.type);
}

Moved moved(const Operation& operation, const Board& board) {
  const auto bytes = operation.bytes();
  const int64_t others = board.size() - 1;
  const bool is_root = board.rank() == operation.root;
  switch (operation.kind) {
    case OpKind::kAllReduce:
      if (is_chained(operation, board)) {
        return {read_in_chain(bytes, board), 0};
      }
      return is_chunked(operation, board) ? moved_by_owner(operation, board) : Moved{others * bytes, 0};
    case OpKind::kReduce:
      return {is_root ? others * bytes : 0, 0};
    case OpKind::kAllGather:
      return {others * bytes, 0};
    case OpKind::kReduceScatter:
      return {others * (bytes / board.size()), 0};
    case OpKind::kBroadcast:
      return {is_root ? 0 : bytes, 0};
  }
  return {};
}

std::string describe(const Operation& operation, uint64_t seq) {
  return std::string(kind_name(operation.kind)) + " of " + std::to_string(operation.bytes()) + " bytes (operation " +
         std::to_string(seq) + ")";
}

std::string details(const Operation& operation, const Board& board) {
  constexpr const char* kTypes[] = {"float64", "float32", "float16", "bfloat16", "int8",
                                    "uint8",   "int16",   "int32",   "int64"};
  constexpr const char* kOps[] = {"sum", "min", "max"};
  const auto kind = operation.kind;
  const bool known = operation.root >= 0 && operation.root < board.size();
  if (kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter || kind == OpKind::kReduce) {
    return std::string(" [") + kOps[static_cast<size_t>(operation.op)] + " of " +
           kTypes[static_cast<size_t>(operation.type)] +
           (kind == OpKind::kReduce && known ? " to " + board.name(operation.root) : "") + "]";
  }
  if (kind == OpKind::kBroadcast) {
    return " [from " + (known ? board.name(operation.root) : "rank " + std::to_string(operation.root)) + "]";
  }
  return "";
}

}  // namespace torchddp::shm
