#include "shm/grid.h"

#include <algorithm>

#include "common/round_up.h"

namespace torchddp::shm {
namespace {

// Of each rank's block: small enough to stay in cache until it is written to all, large enough to be worth claiming.
constexpr int64_t kChunkBytes = 64 * 1024;
// Chunks begin at multiples of this many elements: whole cache lines for every type.
constexpr int64_t kUnit = 128;

}  // namespace

Range Grid::range(int first, int last) const {
  return {std::min(numel, first * chunk_numel), std::min(numel, last * chunk_numel)};
}

std::span<const Group> nodes_of(const Operation& operation, const Board& board) {
  const bool keeps_bits = operation.type != kernels::DType::kF16 && operation.type != kernels::DType::kBF16;
  const auto& groups = board.groups();
  return keeps_bits && !board.spans() ? groups.nodes() : groups.all();
}

int owners_of(const Group& node, const Board& board) { return board.spans() ? board.owners() : node.size; }

Grid grid_of(const Operation& operation, const Board& board) {
  int least = kMaxRanks;
  int most = 1;
  for (const auto& node : nodes_of(operation, board)) {
    least = std::min(least, owners_of(node, board));
    most = std::max(most, owners_of(node, board));
  }
  const auto numel = operation.numel;
  const auto share = round_up(ceil_div(numel, most), kUnit);
  const auto max_chunks = int64_t{Marks::kMaxChunks} * least;
  // The same number for each owner, so that they have equal work; the last ones may be empty.
  const auto each = std::clamp(ceil_div(share * kernels::item_size(operation.type), kChunkBytes), int64_t{1},
                               std::max<int64_t>(max_chunks / most, 1));
  const auto chunks = std::min(each * most, max_chunks);
  return {numel, std::max(round_up(ceil_div(numel, chunks), kUnit), kUnit), static_cast<int>(chunks)};
}

}  // namespace torchddp::shm
