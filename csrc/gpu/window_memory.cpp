#include "gpu/window_memory.h"

#include <algorithm>
#include <utility>

#include "kernels/hash.h"

namespace torchddp::gpu {
namespace {

// Depends on the order of the words.
uint64_t mixed(uint64_t hash, uint64_t kind, uint64_t word) {
  return kernels::mix_bits(kernels::mix_bits(hash + kind) ^ word);
}

uint64_t mixed(uint64_t hash, const WindowMemory::Change& change) {
  for (const auto& block : change.give_back) {
    hash = block->number == 0 ? hash : mixed(hash, 1, block->number);
  }
  for (const auto& block : change.make) {
    hash = mixed(hash, 2, static_cast<uint64_t>(block->bytes));
  }
  return hash;
}

}  // namespace

void WindowMemory::let_go(BlockPtr block) {
  std::erase(new_, block);
  // Ranks may release blocks in different orders.
  const auto place = std::upper_bound(let_go_.begin(), let_go_.end(), block,
                                      [](const auto& a, const auto& b) { return a->number < b->number; });
  let_go_.insert(place, std::move(block));
}

int64_t WindowMemory::propose() {
  proposed_ = {let_go_, new_};
  return static_cast<int64_t>(mixed(history_, proposed_) | 1U);
}

WindowMemory::Change WindowMemory::take_proposal() {
  auto change = std::exchange(proposed_, {});
  history_ = mixed(history_, change);
  for (const auto& block : change.give_back) {
    std::erase(let_go_, block);
  }
  for (const auto& block : change.make) {
    block->number = ++registered_;
    std::erase(new_, block);
  }
  // A block released since the proposal is registered anyway; its place is now that of its number.
  std::stable_sort(let_go_.begin(), let_go_.end(), [](const auto& a, const auto& b) { return a->number < b->number; });
  return change;
}

std::vector<BlockPtr> WindowMemory::take_let_go() {
  auto blocks = std::exchange(let_go_, {});
  history_ = mixed(history_, {blocks, {}});
  proposed_ = {};
  return blocks;
}

}  // namespace torchddp::gpu
