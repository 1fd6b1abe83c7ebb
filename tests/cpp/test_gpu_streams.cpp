// Which streams wait for which: see Note [Streams and lifetimes].
#include <memory>

#include "check.h"
#include "gpu/bucket_streams.h"
#include "gpu_recorder.h"

namespace torchddp::gpu {
namespace {

using testing::Diary;
using testing::RecordingDevice;
using Lines = std::vector<std::string>;

// A bucket whose gradients arrived on these streams, in order. e1 is its event.
struct Fixture {
  explicit Fixture(std::initializer_list<int> producers) {
    for (const int stream : producers) {
      device->current = stream;
      streams.note();
    }
  }

  void pack() {
    streams.begin_packing();
    streams.end_packing();
  }

  Diary diary;
  std::shared_ptr<RecordingDevice> device = std::make_shared<RecordingDevice>(diary);
  BucketStreams streams{device};
};

TEST(gpu_one_stream_needs_no_event) {
  Fixture f{1, 1};
  f.pack();
  f.streams.follow();
  f.streams.finish();
  CHECK(f.diary.take().empty());
}

TEST(gpu_the_packing_stream_waits_for_all_others_and_they_for_it) {
  Fixture f{3, 1, 4, 3, 1};
  f.streams.begin_packing();
  CHECK(f.diary.take() == (Lines{"record e1 s3", "s1 waits e1", "record e1 s4", "s1 waits e1"}));
  f.streams.end_packing();
  CHECK(f.diary.take() == (Lines{"record e1 s1", "s3 waits e1", "s4 waits e1"}));
}

TEST(gpu_a_packing_stream_that_made_no_gradient_waits_for_all) {
  Fixture f{3};
  f.device->current = 1;
  f.pack();
  CHECK(f.diary.take() == (Lines{"record e1 s3", "s1 waits e1", "record e1 s1", "s3 waits e1"}));
  f.streams.begin_step();  // forgets all of them
  f.streams.begin_packing();
  CHECK(f.diary.take().empty());
}

TEST(gpu_a_launch_on_another_stream_waits_for_the_packing) {
  Fixture f{3};
  f.pack();
  f.device->current = 5;
  f.streams.follow();
  CHECK(f.diary.take() == (Lines{"record e1 s3", "s5 waits e1"}));
}

TEST(gpu_memory_of_gradients_that_were_reduced_in_place_is_used_again_after_the_reduction) {
  Fixture f{3, 4};
  f.pack();
  f.diary.take();
  f.device->current = 1;  // the stream on which the end of backward waited for the reduction
  f.streams.finish();
  CHECK(f.diary.take() == (Lines{"record e1 s1", "s3 waits e1", "s4 waits e1"}));
}

TEST(gpu_each_device_has_its_own_streams_and_events) {
  Diary diaries[2];
  const std::shared_ptr<RecordingDevice> devices[2] = {std::make_shared<RecordingDevice>(diaries[0]),
                                                       std::make_shared<RecordingDevice>(diaries[1])};
  {
    BucketStreams first(devices[0]);
    BucketStreams second(devices[1]);
    for (const int stream : {7, 8}) {
      devices[1]->current = stream;
      second.note();
    }
    devices[0]->current = 3;
    first.note();
    // The first bucket may be launched from a hook on the second's device.
    first.begin_packing();
    second.begin_packing();
    CHECK(diaries[0].take().empty());
    CHECK(diaries[1].take() == (Lines{"record e1 s7", "s8 waits e1"}));
  }
  CHECK_EQ(devices[0]->alive.load() + devices[1]->alive.load(), 0);
}

}  // namespace
}  // namespace torchddp::gpu
