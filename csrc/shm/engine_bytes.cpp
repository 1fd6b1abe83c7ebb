// How many bytes of other ranks' memory an operation takes this rank to read or write.
#include <numeric>

#include "shm/engine.h"

namespace torchddp::shm {

Engine::Moved Engine::moved(const Operation& operation) const {
  const auto bytes = operation.bytes();
  const int64_t others = size() - 1;
  const bool is_root = config_.rank == operation.root;
  switch (operation.kind) {
    case OpKind::kAllReduce:
      return is_eager(operation) ? Moved{others * bytes, 0} : moved_by_owner(operation);
    case OpKind::kReduce:
      return {is_root ? others * bytes : 0, 0};
    case OpKind::kAllGather:
      return {others * bytes, 0};
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll:
      return {others * (bytes / size()), 0};
    case OpKind::kBroadcast:
      return {is_root ? 0 : bytes, 0};
    case OpKind::kScatter:
      return {is_root ? 0 : bytes / size(), 0};
    case OpKind::kAllToAllSplits: {
      const auto& expected = operation.expected;
      const auto total = std::accumulate(expected.begin(), expected.end(), int64_t{0});
      return {expected.empty() ? 0 : total - expected[static_cast<size_t>(config_.rank)], 0};
    }
  }
  return {};
}

// Reads the others' addends of its shard, and writes the sums to all of them.
Engine::Moved Engine::moved_by_owner(const Operation& operation) const {
  if (config_.rank >= config_.owners) {
    return {};
  }
  const auto range = shard(operation, config_.rank);
  const auto numel = range.end - range.begin;
  const auto read_item = kernels::item_size(operation.wire_memory != nullptr ? operation.wire : operation.type);
  const auto per_rank = numel * (read_item + kernels::item_size(operation.type));
  return {(size() - 1) * per_rank, config_.outer != nullptr ? numel : 0};
}

}  // namespace torchddp::shm
