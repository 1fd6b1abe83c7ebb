#include "gpu/nccl.h"

#include <array>
#include <cstddef>

#include "kernels/pack.h"

namespace torchddp::gpu {

std::string version_problem(int running, int built) {
  // The communicator's config struct grows with each minor version, and an older library refuses a newer one.
  if (running / 10000 == built / 10000 && running / 100 >= built / 100) return "";
  const auto text = [](int version) {  // "2.29.7" of 22907
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100);
  };
  return "torchddp was built with NCCL " + text(built) + ", but NCCL " + text(running) +
         " is loaded: it must be of the same major version and not older. Install the nvidia-nccl package that this "
         "torch asks for, or check LD_LIBRARY_PATH and LD_PRELOAD";
}

int all_reduce_together(Nccl& nccl, Comm comm, Stream stream, kernels::DType type, const Memory& packed,
                        std::span<const Memory> in_place, double scale, int size) {
  SumOp scaled_sum = kPlainSum;
  if (size > 1 || scale != 1.0) {
    if (const auto result = nccl.make_pre_mul_sum(&scaled_sum, scale, type, comm); result != kNcclSuccess) {
      return result;
    }
  }
  auto result = nccl.group_start();
  if (result == kNcclSuccess) {
    const auto add = [&](const Memory& memory, SumOp op) {
      if (result == kNcclSuccess && memory.numel > 0) {
        result = nccl.all_reduce(memory.data, memory.data, memory.numel, type, op, comm, stream);
      }
    };
    add(packed, kPlainSum);
    for (const auto& memory : in_place) add(memory, scaled_sum);
    // Also after an error, or the thread would stay in the group.
    const auto ended = nccl.group_end();
    result = result == kNcclSuccess ? ended : result;
  }
  // After an error the communicator, and its reduction operators with it, may have been aborted and freed.
  if (scaled_sum != kPlainSum && (result == kNcclSuccess || result == kNcclInProgress)) {
    nccl.destroy_op(scaled_sum, comm);
  }
  return result;
}

bool can_scale_by(kernels::DType type, double scale) {
  if (type == kernels::DType::kF64) return true;
  alignas(double) std::array<std::byte, sizeof(double)> rounded{};
  float back = 0;
  kernels::scale_cast(rounded.data(), type, &scale, kernels::DType::kF64, 1, 1.0);
  kernels::scale_cast(&back, kernels::DType::kF32, rounded.data(), type, 1, 1.0);
  return back == static_cast<float>(scale);
}

}  // namespace torchddp::gpu
