#include "shm/operation.h"

#include <algorithm>

#include "common/round_up.h"

namespace torchddp::shm {

const char* kind_name(OpKind kind) {
  constexpr const char* kNames[kNumOpKinds] = {
      "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
  };
  const auto index = static_cast<size_t>(kind);
  return index < kNumOpKinds ? kNames[index] : "an unknown operation";
}

bool is_eager(const Operation& operation, const Board& board) {
  if (operation.form != Form::kUsual) return operation.form == Form::kQuestion;
  if (operation.bytes() > kEagerBytes || operation.kind != OpKind::kAllReduce) {
    return operation.bytes() <= kEagerBytes;
  }
  return (board.size() - 1) * operation.bytes() <= kPulledBytes && !board.spans();
}

bool is_chunked(const Operation& operation, const Board& board) {
  return operation.kind == OpKind::kAllReduce && operation.form == Form::kUsual && !is_eager(operation, board);
}

bool can_count(const Operation& operation, const Board& board) {
  return is_chunked(operation, board) && operation.op == kernels::ReduceOp::kSum && kernels::is_float(operation.type);
}

Grid::Grid(const Operation& operation, const Board& board) : numel(operation.numel), owners(board.owners()) {
  const auto part = round_up(ceil_div(numel, owners), kUnit);
  each = static_cast<int>(std::clamp(ceil_div(part * kernels::item_size(operation.type), kChunkBytes), int64_t{1},
                                     int64_t{Marks::kMaxChunks}));
  chunk_numel = std::max(round_up(ceil_div(numel, int64_t{each} * owners), kUnit), kUnit);
}

Grid::Share Grid::share(int rank) const { return rank < owners ? Share{rank * each, (rank + 1) * each} : Share{}; }

Range Grid::range(Share share) const {
  return {std::min(numel, share.begin * chunk_numel), std::min(numel, share.end * chunk_numel)};
}

Moved moved(const Operation& operation, const Board& board) {
  const auto bytes = operation.bytes();
  const int64_t others = board.size() - 1;
  const bool is_root = board.rank() == operation.root;
  if (is_chunked(operation, board)) {  // an owner reads the others' addends and writes the sums to all ranks
    const Grid grid(operation, board);
    const auto numel = grid.range(grid.share(board.rank())).numel();
    return {numel * others * 2 * kernels::item_size(operation.type), board.spans() ? numel : 0};
  }
  switch (operation.kind) {
    case OpKind::kReduce: return {is_root ? others * bytes : 0, 0};
    case OpKind::kAllReduce:
    case OpKind::kAllGather: return {others * bytes, 0};
    case OpKind::kReduceScatter: return {others * (bytes / board.size()), 0};
    case OpKind::kBroadcast: return {is_root ? 0 : bytes, 0};
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
