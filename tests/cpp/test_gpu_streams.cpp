// Which stream waits for which: see Note [Streams and lifetimes].
#include "check.h"
#include "gpu/stream_set.h"
#include "gpu_recorder.h"

namespace torchddp::gpu {
namespace {

using testing::Diary;
using testing::RecordingDevice;
using Lines = std::vector<std::string>;

Stream stream(int number) { return RecordingDevice::handle(number); }

TEST(gpu_one_stream_needs_no_event) {
  Diary diary;
  RecordingDevice device(diary);
  StreamSet set;
  set.add(stream(1));
  set.add(stream(1));
  CHECK_EQ(set.streams().size(), size_t{1});
  set.join_into(device, stream(1), stream(9));
  set.wait_back(device, stream(1), stream(9));
  CHECK(diary.take().empty());
}

TEST(gpu_the_packing_stream_waits_for_all_others_and_they_for_it) {
  Diary diary;
  RecordingDevice device(diary);
  StreamSet set;
  for (const int number : {3, 1, 4, 1, 3}) {
    set.add(stream(number));
  }
  set.join_into(device, stream(1), stream(9));
  CHECK(diary.take() == (Lines{"record e9 s3", "s1 waits e9", "record e9 s4", "s1 waits e9"}));
  set.wait_back(device, stream(1), stream(9));
  CHECK(diary.take() == (Lines{"record e9 s1", "s3 waits e9", "s4 waits e9"}));
}

TEST(gpu_a_packing_stream_that_made_no_gradient_waits_for_all) {
  Diary diary;
  RecordingDevice device(diary);
  StreamSet set;
  set.add(stream(3));
  set.join_into(device, stream(1), stream(9));
  set.wait_back(device, stream(1), stream(9));
  CHECK(diary.take() == (Lines{"record e9 s3", "s1 waits e9", "record e9 s1", "s3 waits e9"}));
  set.clear();
  set.join_into(device, stream(1), stream(9));
  CHECK(diary.take().empty());
}

}  // namespace
}  // namespace torchddp::gpu
