// Large gradients, born in shared memory.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "common/forks.h"
#include "shm/segment.h"

namespace torchddp::transport {

// Note [Gradients born in shared memory]
// Copying a large gradient into its bucket costs more than reducing it. Where the gradient itself lies in the segment nothing is
// copied: the bucket adopts it (Note [Adopted gradients] in bucket/grad_slot.h). So during backward the pool answers torch's
// requests for CPU memory of exactly the size of such a gradient, in the place of torch's own allocator, with blocks of the
// segment. It can't know which request becomes the gradient; any other tensor of the size works as well in such a block, and gives
// it back when it dies. Requests of other sizes, outside of backward, and beyond what is expected pass on to torch's allocator;
// then the gradient is copied as it would be without the pool. There is one block per expected gradient and size, and kSpare more,
// for a new gradient is born before the last step's has gone.
//
// torch has one CPU allocator per process; ours is put before it when the first pool expects a gradient, and stays there, since
// tensors carry pointers to it. With no pool active it costs one relaxed load.
//
// The blocks are shared memory: a child that is forked while a pool is active has copies of its parent's tensors in them, which it may drop,
// and gets no others.
class GradientPool : public std::enable_shared_from_this<GradientPool> {
 public:
  explicit GradientPool(std::shared_ptr<shm::Segment> segment) : segment_(std::move(segment)), forks_(forks()) {}
  ~GradientPool() { expect({}); }

  // Sizes in bytes, one entry per gradient; replaces what was expected before. Those below kMinBytes are ignored.
  void expect(std::span<const int64_t> sizes);
  // From here on requests are answered, or not.
  void set_active(bool active);

  // A block of exactly this size, or null.
  void* take(int64_t bytes);
  void give_back(void* block, int64_t bytes);

  static constexpr int64_t kMinBytes = 128 * 1024;
  static constexpr int64_t kSpare = 2;

 private:
  // In a child all of it is the parent's, and locks may be held by threads that are not there.
  bool is_inherited() const { return forks() != forks_; }

  struct Shelf {
    int64_t expected = 0;
    int64_t blocks = 0;  // made, free or not
    std::vector<void*> free;
  };

  std::shared_ptr<shm::Segment> segment_;
  const int forks_;
  std::mutex mutex_;
  std::unordered_map<int64_t, Shelf> shelves_;  // by bytes
  bool active_ = false;
};

}  // namespace torchddp::transport
