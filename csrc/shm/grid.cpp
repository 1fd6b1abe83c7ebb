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

}  // namespace torchddp::shm
