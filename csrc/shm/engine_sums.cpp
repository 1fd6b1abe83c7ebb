// How ranges of blocks are summed: scaled, narrow, checked, or as they are.
#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/pack.h"
#include "shm/engine.h"

namespace torchddp::shm {

void Engine::sum_range(const Running& op, Range range, bool to_all) {
  const auto offset = range.begin * kernels::item_size(op.operation.type);
  const auto count = op.blocks.size();
  std::array<const void*, kMaxRanks> sources;
  std::array<void*, kMaxRanks> targets;
  for (size_t rank = 0; rank < count; ++rank) {
    sources[rank] = targets[rank] = op.blocks[rank] + offset;
  }
  const auto mine = static_cast<size_t>(config_.rank);
  const auto written =
      to_all ? std::span<void* const>(targets.data(), count) : std::span<void* const>(&targets[mine], 1);
  if (has_wire(op)) {
    sum_wires(op, range, written);
  } else if (op.counts) {
    sum_checked(op, written, {sources.data(), count}, range.end - range.begin);
  } else {
    sum_ranks(op, written, {sources.data(), count}, range.end - range.begin);
  }
}

// Whoever sums tells the others what it found, in their own slots: nobody else empties those.
void Engine::sum_checked(const Running& op, std::span<void* const> targets, std::span<const void* const> sources,
                         int64_t numel) {
  std::array<int64_t, kMaxRanks> counts;
  const std::span<int64_t> found(counts.data(), sources.size());
  std::fill(found.begin(), found.end(), 0);
  const auto scales = op.scaled ? std::span<const double>(op.scales) : std::span<const double>();
  if (!kernels::checked_sum_ranks(targets, sources, scales, op.operation.type, numel, found)) [[likely]] {
    return;
  }
  for (size_t rank = 0; rank < sources.size(); ++rank) {
    auto& theirs = slot(static_cast<int>(rank), op.seq);
    theirs.sums_not_finite.store(1);
    if (op.counted[rank] != 0) {
      theirs.non_finite.fetch_add(static_cast<uint64_t>(found[rank]));
    }
  }
}

// Sums of 16-bit floats, formed and written in kF32, piece by piece so that they stay in the first cache.
void Engine::sum_wires(const Running& op, Range range, std::span<void* const> targets) const {
  constexpr int64_t kPiece = 2048;
  std::array<float, kPiece> total;
  std::array<float, kPiece> next;
  const auto wire = op.operation.wire;
  const auto wire_item = kernels::item_size(op.operation.wire);
  for (auto begin = range.begin; begin < range.end; begin += kPiece) {
    const auto numel = std::min(kPiece, range.end - begin);
    for (size_t rank = 0; rank < op.wires.size(); ++rank) {
      const auto* source = op.wires[rank] + begin * wire_item;
      kernels::scale_cast(rank == 0 ? total.data() : next.data(), kernels::DType::kF32, source, wire, numel, 1.0);
      if (rank > 0) {
        void* const sum = total.data();
        const std::array<const void*, 2> sources{total.data(), next.data()};
        kernels::reduce_ranks({&sum, 1}, sources, kernels::DType::kF32, kernels::ReduceOp::kSum, numel);
      }
    }
    for (auto* target : targets) {
      std::memcpy(static_cast<std::byte*>(target) + (begin - range.begin) * static_cast<int64_t>(sizeof(float)),
                  total.data(), static_cast<size_t>(numel) * sizeof(float));
    }
  }
}

void Engine::sum_ranks(const Running& op, std::span<void* const> targets, std::span<const void* const> sources,
                       int64_t numel) const {
  const auto& operation = op.operation;
  if (op.scaled && !has_wire(op) && operation.op == kernels::ReduceOp::kSum && kernels::can_scale(operation.type)) {
    kernels::scaled_sum_ranks(targets, sources, op.scales, operation.type, numel);
  } else {
    kernels::reduce_ranks(targets, sources, operation.type, operation.op, numel);
  }
}

}  // namespace torchddp::shm
