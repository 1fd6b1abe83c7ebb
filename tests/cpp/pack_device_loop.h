// A device in its plainest form: the bodies of the pack kernels, looped over blocks and threads on the CPU. Chooses the kernel as
// pack_cuda.cu does.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/pack_device_body.h"
#include "kernels/pack_device_plan.h"

namespace torchddp::kernels::device {

// Calls body.operator()<dtype>() for a floating point type.
template <class Body>
void with_float_type(DType dtype, const Body& body) {
  if (dtype == DType::kF64) body.template operator()<DType::kF64>();
  if (dtype == DType::kF32) body.template operator()<DType::kF32>();
  if (dtype == DType::kF16) body.template operator()<DType::kF16>();
  if (dtype == DType::kBF16) body.template operator()<DType::kBF16>();
}

// How the blocks of a launch are run. Results must depend on neither.
struct Schedule {
  int64_t max_blocks = kMaxBlocks;  // fewer blocks than the plan has: longer slices
  bool backwards = false;           // blocks and threads
};

// A block: its threads one after another, then the steps of the sum, each with a barrier before it.
template <class Kernel, bool kStats, int kCapacity>
void run_block(const PieceTable<kCapacity>& table, uint32_t num_blocks, uint32_t block, bool backwards) {
  std::vector<Partial> sums(kThreads, Partial{0, 0});
  for (int i = 0; i < kThreads; ++i) {
    const int thread = backwards ? kThreads - 1 - i : i;
    Kernel::run_thread(table, num_blocks, block, thread, sums[static_cast<size_t>(thread)]);
  }
  if constexpr (kStats) {
    for (int stride = kThreads / 2; stride > 0; stride /= 2) {
      for (int thread = 0; thread < kThreads; ++thread) fold_step(sums.data(), thread, stride);
    }
    table.partials[block] = sums[0];
  }
}

template <class Kernel, bool kStats, int kCapacity>
void run_grid(const PieceTable<kCapacity>& table, uint32_t num_blocks, bool backwards) {
  for (uint32_t i = 0; i < num_blocks; ++i) {
    run_block<Kernel, kStats>(table, num_blocks, backwards ? num_blocks - 1 - i : i, backwards);
  }
}

template <bool kStats, int kCapacity>
void run_kernel(const Job& job, const PieceTable<kCapacity>& table, uint32_t num_blocks, bool backwards) {
  if (!job.is_copy()) {
    with_float_type(job.dst_type(), [&]<DType Dst>() {
      with_float_type(job.src_type(), [&]<DType Src>() {
        run_grid<Pack<Dst, Src, false, kStats>, kStats>(table, num_blocks, backwards);
      });
    });
  } else if constexpr (kStats) {
    with_float_type(job.dst_type(),
                    [&]<DType Dst>() { run_grid<Pack<Dst, Dst, true, true>, true>(table, num_blocks, backwards); });
  } else {
    switch (item_size(job.dst_type())) {
      case 1:
        return run_grid<Pack<DType::kU8, DType::kU8, true, false>, false>(table, num_blocks, backwards);
      case 2:
        return run_grid<Pack<DType::kI16, DType::kI16, true, false>, false>(table, num_blocks, backwards);
      case 4:
        return run_grid<Pack<DType::kI32, DType::kI32, true, false>, false>(table, num_blocks, backwards);
      default:
        return run_grid<Pack<DType::kI64, DType::kI64, true, false>, false>(table, num_blocks, backwards);
    }
  }
}

// The total of the partial sums, as the one block of the second kernel adds them up.
inline Partial total(const std::vector<Partial>& partials, int64_t count) {
  std::vector<Partial> sums(kThreads);
  for (int thread = 0; thread < kThreads; ++thread) {
    sums[static_cast<size_t>(thread)] = add_partials(partials.data(), count, thread);
  }
  for (int stride = kThreads / 2; stride > 0; stride /= 2) {
    for (int thread = 0; thread < kThreads; ++thread) fold_step(sums.data(), thread, stride);
  }
  return sums[0];
}

struct Outcome {
  int error;
  Partial stats;
};

inline Outcome run(const Job& job, Schedule schedule = {}) {
  const int64_t launches = job.count > 0 ? num_launches(job.count) : 1;
  std::vector<Partial> partials(job.stats ? static_cast<size_t>(launches * kMaxBlocks) : 0);
  int64_t num_partials = 0;
  const int error =
      for_each_launch(job, job.stats ? partials.data() : nullptr, num_partials, [&](auto& table, uint32_t planned) {
        const auto num_blocks = static_cast<uint32_t>(std::min<int64_t>(planned, schedule.max_blocks));
        if (job.stats) {
          for (uint32_t block = num_blocks; block < planned; ++block) table.partials[block] = {0, 0};
          run_kernel<true>(job, table, num_blocks, schedule.backwards);
        } else {
          run_kernel<false>(job, table, num_blocks, schedule.backwards);
        }
        return 0;
      });
  return {error, job.stats && error == 0 ? total(partials, num_partials) : Partial{0, 0}};
}

}  // namespace torchddp::kernels::device
