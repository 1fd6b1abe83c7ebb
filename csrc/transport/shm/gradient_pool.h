// Lets autograd allocate large gradients directly in shared memory.
#pragma once

#include <c10/core/Allocator.h>

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
// Copying a large gradient into its bucket costs more than reducing it. If the gradient already lies in the segment, nothing is
// copied: the bucket adopts it (Note [Adopted gradients] in bucket/grad_slot.h). So during backward the pool serves torch's
// requests for CPU memory of exactly the size of such a gradient with blocks of the segment, in place of torch's allocator. It
// can't know which request becomes the gradient; any other tensor of that size works as well in such a block, and returns it
// when it dies. Requests of other sizes, outside of backward, or beyond the expected number go to torch's allocator, and then
// the gradient is copied as it would be without the pool. There is one block per expected gradient and size, plus kSpare,
// because a new gradient is allocated before the last step's is freed.
//
// torch has one CPU allocator per process. Ours is installed in front of it when the first pool expects a gradient, and stays,
// because tensors hold pointers to it. With no active pool it costs one relaxed load.
//
// The blocks are shared memory: a child forked while a pool is active has copies of its parent's tensors in them, which it may
// drop, and gets no new ones.
class GradientPool : public std::enable_shared_from_this<GradientPool> {
 public:
  explicit GradientPool(std::shared_ptr<shm::Segment> segment) : segment_(std::move(segment)), forks_(forks()) {}
  ~GradientPool() { expect({}); }

  // Sizes in bytes, one per gradient; replaces the previous expectation. Sizes below kMinBytes are ignored.
  void expect(std::span<const int64_t> sizes);
  // Whether requests are served from here on.
  void set_active(bool active);

  // Releases free blocks, the largest first, until this many bytes or fewer are free.
  void trim(int64_t bytes);

  // A block of exactly this size, or null.
  void* take(int64_t bytes);
  void give_back(void* block, int64_t bytes);

  static constexpr int64_t kMinBytes = 128 * 1024;
  static constexpr int64_t kSpare = 2;

 private:
  // In a child everything belongs to the parent, and locks may be held by threads that don't exist there.
  bool is_inherited() const { return forks() != forks_; }

  struct Shelf {
    int64_t expected = 0;
    int64_t blocks = 0;  // allocated, free or not
    std::vector<void*> free;
  };

  std::shared_ptr<shm::Segment> segment_;
  const int forks_;
  std::mutex mutex_;
  std::unordered_map<int64_t, Shelf> shelves_;  // by bytes
  bool active_ = false;
};

}  // namespace torchddp::transport
