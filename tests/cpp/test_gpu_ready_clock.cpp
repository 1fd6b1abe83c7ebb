// Ready times by the device's clock: where events are recorded; captured graphs are not timed.
#include <optional>

#include "check.h"
#include "gpu/ready_clock.h"
#include "gpu_recorder.h"

namespace torchddp::gpu {
namespace {

using testing::Diary;
using testing::RecordingDevice;
using Lines = std::vector<std::string>;

TEST(gpu_ready_times_are_differences_of_events) {
  Diary diary;
  auto device = std::make_shared<RecordingDevice>(diary);
  std::optional<ReadyClock> made(std::in_place, device, 3);
  CHECK_EQ(device->alive.load(), 5);
  auto& clock = *made;
  clock.begin_forward();
  clock.begin_backward();
  clock.mark(2);
  device->current = 4;  // a gradient on another stream
  clock.mark(0);
  CHECK(diary.take() == (Lines{"record e1 s1", "record e2 s1", "record e5 s1", "record e3 s4"}));
  // The recorder's event n completes n ms after event 0.
  CHECK(clock.read_ns() == (std::vector<int64_t>{1'000'000, 0, 3'000'000}));
  CHECK(diary.take() == (Lines{"synchronize e2", "synchronize e3", "synchronize e5"}));
  CHECK_EQ(clock.forward_ns(), 1'000'000);
  CHECK(diary.take() == (Lines{"synchronize e1", "synchronize e2"}));
  clock.begin_forward();
  CHECK_EQ(clock.forward_ns(), 0);  // backward has not started
  clock.begin_backward();
  clock.mark(1);
  CHECK(clock.read_ns() == (std::vector<int64_t>{0, 2'000'000, 0}));  // nothing is left of the previous step
  made.reset();
  CHECK_EQ(device->alive.load(), 0);
}

TEST(gpu_ready_times_of_a_captured_step_are_not_taken) {
  Diary diary;
  auto device = std::make_shared<RecordingDevice>(diary);
  ReadyClock clock(device, 1);
  device->captures = true;
  clock.begin_forward();
  clock.begin_backward();
  clock.mark(0);
  CHECK(diary.take().empty());
  CHECK(clock.read_ns() == std::vector<int64_t>{0});
  CHECK_EQ(clock.forward_ns(), 0);
}

}  // namespace
}  // namespace torchddp::gpu
