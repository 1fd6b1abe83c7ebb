// The streams that the gradients of a bucket were produced on.
#pragma once

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
//   on the stream that it came from: that stream waits for the packing (wait_back), so nothing overwrites what is still read.
// - A bucket outlives the step; an operation that fails or times out holds on to it until the device is done with it
//   (Communicator::start's `keep`). Memory of NCCL is given back only when the device is idle (Note [When windows are freed]).
// - `param.grad` is a view of the bucket. Who reads it on the stream that was current when backward() returned, or on one that waits
//   for that, reads reduced values.
//
// Events are recorded again and again: a wait means the last record before it, so one event serves all fork points in turn.
class StreamSet {
 public:
  // The same stream may be added again and again.
  void add(Stream stream);
  void clear() { streams_.clear(); }
  const std::vector<Stream>& streams() const { return streams_; }

  // `target` waits for all others; `event` is used for it.
  void join_into(Device& device, Stream target, Event event) const;
  // All others wait for what `source` has been given so far.
  void wait_back(Device& device, Stream source, Event event) const;

 private:
  std::vector<Stream> streams_;  // rarely more than one
};

}  // namespace torchddp::gpu
