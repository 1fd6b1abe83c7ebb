// The streams that one bucket meets in a step.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "gpu/device.h"

namespace torchddp::gpu {

// Note [Streams and lifetimes]
// Autograd runs each node on the stream of its forward, so the gradients of one bucket may come from several streams, and the
// hook of the last one packs them all:
//
//   compute streams   ... grad ...  | record            wait | ...      another gradient may take the freed memory
//   packing stream    ...             wait | pack | record     ...      the stream of the last gradient
//   comm stream                                 wait | all-reduce | record
//   at the end        current stream of the caller                  wait | optimizer ...
//
// No arrow blocks the host. Memory is safe without torch's record_stream, which would delay reuse for an unknown time and does
// not work in captured graphs:
//   - A packed gradient is freed at once on the host. torch's allocator may then give its memory to whatever is queued next on
//     the stream that it came from; that stream waits for the packing (end_packing), so nothing is overwritten while it is
//     still being read.
//   - A gradient that is reduced in place, or gets a copy of its average, may be freed from the end of backward on. By then the
//     stream that it came from waits for that (finish), as does the current stream.
//   - A bucket outlives the step; an operation that fails or times out holds it until the device is done (Communicator::start's
//     `keep`).
//   - `param.grad` is a view of the bucket. Code that reads it on the stream that was current when backward() returned, or on
//     one that waits for that stream, reads reduced values.
//
// Events are reused: a wait refers to the last record before it, so one event serves all fork points in turn.
//
// "The current stream" is torch's, for the bucket's device in the calling thread. Several threads may call note() concurrently;
// the other methods are called by one thread at a time, after the last note() of a step.
class BucketStreams {
 public:
  explicit BucketStreams(std::shared_ptr<Device> device);
  ~BucketStreams();
  BucketStreams& operator=(BucketStreams&&) = delete;

  const Device* device() const { return device_.get(); }
  void begin_step();
  // Called in the hook of a gradient of the bucket, whichever moment packs it: the current stream is the one that produced it.
  void note();
  // The current stream waits for all gradients and gets the packing; then the gradients' streams wait for that.
  void begin_packing();
  void end_packing();
  // Called before the bucket is launched, possibly in the hook of an earlier one and on another stream than the one that packed
  // it.
  void follow();
  // The current stream has everything that uses the averages queued. The streams that may reuse the memory of gradients wait for
  // that.
  void finish();

 private:
  // The gradients' streams, except `source`, wait for what `source` has queued so far.
  void make_producers_wait(Stream source, Place where = Place::current());

  const std::shared_ptr<Device> device_;
  const Event fork_;
  std::mutex mutex_;               // of producers
  std::vector<Stream> producers_;  // rarely more than one
  Stream packed_on_ = nullptr;
};

}  // namespace torchddp::gpu
