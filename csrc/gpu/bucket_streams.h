// The streams that one bucket meets in a step.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "gpu/device.h"

namespace torchddp::gpu {

// Note [Streams and lifetimes]
// Autograd runs each node on the stream of its forward, so the gradients of one bucket may come from several streams, and the hook
// of the last one packs them all:
//
//   compute streams   ... grad ...  | record            wait | ...      another gradient may take the freed memory
//   packing stream    ...             wait | pack | record     ...      the stream of the last gradient
//   comm stream                                 wait | all-reduce | record
//   at the end        current stream of the caller                  wait | optimizer ...
//
// No arrow blocks the host. Memory is safe without torch's record_stream, which would keep it from being used again for an unknown
// time and is no good in captured graphs:
// - A gradient that was packed is freed at once, on the host. torch's allocator may then give its memory to whatever is queued next
//   on the stream that it came from: that stream waits for the packing (end_packing), so nothing overwrites what is still read.
// - A gradient that is reduced where it lies may be freed from the end of backward on: by then the stream that it came from waits
//   for the reduction (finish), as the current stream does.
// - A bucket outlives the step; an operation that fails or times out holds on to it until the device is done with it
//   (Communicator::start's `keep`). Memory of NCCL is given back only when the device is idle (Note [When windows are made]).
// - `param.grad` is a view of the bucket. Who reads it on the stream that was current when backward() returned, or on one that waits
//   for that, reads reduced values.
//
// Events are recorded again and again: a wait means the last record before it, so one event serves all fork points in turn.
//
// "The current stream" is torch's of the bucket's device, in the calling thread. note() may be called by several threads at once, the
// others by one at a time, after the last note() of a step.
class BucketStreams {
 public:
  explicit BucketStreams(std::shared_ptr<Device> device);
  ~BucketStreams();
  BucketStreams(const BucketStreams&) = delete;
  BucketStreams& operator=(const BucketStreams&) = delete;

  const Device* device() const { return device_.get(); }
  void begin_step();
  // In the hook of a gradient of the bucket: the current stream is the one that produced it.
  void note();
  // The current stream waits for all gradients, and is given the packing; then their streams wait for that.
  void begin_packing();
  void end_packing();
  // Before the bucket is launched: that may be in the hook of an earlier one, on another stream than the one that packed it.
  void follow();
  // The current stream has been given all that is done with the averages: the streams on which the memory of gradients that were
  // reduced in place will be used again wait for that.
  void finish();

 private:
  // The streams of the gradients, but for `source`, wait for what that has been given so far.
  void make_producers_wait(Stream source);

  const std::shared_ptr<Device> device_;
  const Event fork_;
  std::mutex mutex_;               // of producers
  std::vector<Stream> producers_;  // rarely more than one
  Stream packed_on_ = nullptr;
};

}  // namespace torchddp::gpu
