// A bucket and its separate gradients in one NCCL operation.
#include <array>

#include "check.h"
#include "gpu/nccl.h"
#include "gpu_recorder.h"

namespace torchddp::gpu {
namespace {

using testing::Diary;
using testing::RecordingNccl;
using Lines = std::vector<std::string>;

struct Fixture {
  Diary diary;
  RecordingNccl nccl{diary};
  std::array<Memory, 2> others{{{&diary, 100}, {&nccl, 200}}};

  int run(int64_t packed, double scale, int size) {
    return all_reduce_together(nccl, &nccl, reinterpret_cast<Stream>(2), kernels::DType::kF32, {&diary, packed}, others,
                               scale, size);
  }
};

TEST(gpu_gradients_that_lie_apart_travel_in_one_group_and_are_scaled_there) {
  Fixture f;
  CHECK_EQ(f.run(8, 0.25, 4), kNcclSuccess);
  CHECK(f.diary.take() == (Lines{"make op1 times 0.25", "group", "all_reduce 8 s2", "all_reduce 100 s2 op1",
                                 "all_reduce 200 s2 op1", "group end", "destroy op1"}));
  f.run(0, 0.5, 2);
  CHECK_EQ(f.diary.count("all_reduce 0 s2"), 0);
  f.run(8, 1.0, 2);  // ranks' scales may differ, so the reduction must not depend on the scale
  CHECK_EQ(f.diary.count("all_reduce 100 s2 op3"), 1);
  f.diary.take();
  f.run(8, 1.0, 1);  // a single rank with nothing to scale
  CHECK(f.diary.take() == (Lines{"group", "all_reduce 8 s2", "all_reduce 100 s2", "all_reduce 200 s2", "group end"}));
}

TEST(gpu_a_call_that_fails_ends_the_group_all_the_same) {
  Fixture f;
  f.nccl.call_result = 5;
  CHECK_EQ(f.run(8, 0.5, 2), 5);
  CHECK(f.diary.take() == (Lines{"make op1 times 0.5", "group", "all_reduce 8 s2", "group end"}));
}

TEST(gpu_nccl_scales_by_what_the_type_can_hold) {
  using kernels::DType;
  for (const auto type : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    CHECK(can_scale_by(type, 1.0 / 8));
    CHECK_EQ(can_scale_by(type, 1.0 / 3), type == DType::kF64 || type == DType::kF32);
  }
  CHECK(!can_scale_by(DType::kF16, 1e-9));  // rounds to zero
}

TEST(gpu_a_group_in_progress_is_reported) {
  Fixture f;
  f.nccl.group_result = kNcclInProgress;
  CHECK_EQ(f.run(8, 0.5, 2), kNcclInProgress);
}

}  // namespace
}  // namespace torchddp::gpu
