#include "transport/memory_cache.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "common/forks.h"
#include "common/round_up.h"

namespace torchddp::transport {
namespace {

// A program's steps repeat, so keep as many blocks as it has operations in flight, and some more.
constexpr size_t kMostFree = 16;
// Sizes are rounded up so that the same memory serves similar sizes.
constexpr int64_t kUnitBytes = 64 * 1024;
// A block larger than this multiple of the request is left for others.
constexpr int64_t kMostWaste = 4;

int64_t size_of(const at::Tensor& memory) { return static_cast<int64_t>(memory.nbytes()); }

}  // namespace

struct MemoryCache::Shelf {
  // In a forked child: loans are copies of the parent's, and the lock is in an unknown state.
  bool is_inherited() const { return made_in != forks(); }

  const int made_in = forks();
  std::mutex mutex;
  std::vector<at::Tensor> free;  // oldest first
  int64_t bytes = 0;             // lent and free

  at::Tensor find(int64_t bytes, at::Device device) {
    const std::lock_guard lock(mutex);
    auto best = free.end();
    for (auto block = free.begin(); block != free.end(); ++block) {
      if (block->device() == device && size_of(*block) >= bytes && size_of(*block) <= kMostWaste * bytes &&
          (best == free.end() || size_of(*block) < size_of(*best))) {
        best = block;
      }
    }
    if (best == free.end()) return {};
    auto memory = std::move(*best);
    free.erase(best);
    return memory;
  }
  // Keeps only this many, dropping the newest.
  bool trim(size_t blocks) {
    if (is_inherited()) return false;
    std::vector<at::Tensor> dropped;  // with the lock released
    const std::lock_guard lock(mutex);
    for (; free.size() > blocks; free.pop_back()) {
      bytes -= size_of(free.back());
      dropped.push_back(std::move(free.back()));
    }
    return !dropped.empty();
  }
  void count(const at::Tensor& made) {
    const std::lock_guard lock(mutex);
    bytes += size_of(made);
  }
  void give_back(at::Tensor memory) {
    at::Tensor dropped;
    const std::lock_guard lock(mutex);
    free.push_back(std::move(memory));
    if (free.size() > kMostFree) {
      dropped = std::move(free.front());
      free.erase(free.begin());
      bytes -= size_of(dropped);
    }
  }
};

MemoryCache::MemoryCache(Allocate allocate) : allocate_(std::move(allocate)), shelf_(std::make_shared<Shelf>()) {}

at::Tensor MemoryCache::lend(int64_t bytes, at::Device device) {
  const auto wanted = std::max(kUnitBytes, round_up(bytes, kUnitBytes));
  auto memory = shelf_->find(wanted, device);
  if (!memory.defined()) {
    memory = allocate_(wanted, device);
    shelf_->count(memory);
  }
  auto* const data = memory.mutable_data_ptr();
  const auto bytes_taken = size_of(memory);
  const auto options = memory.options();
  return at::from_blob(
      data, {bytes_taken}, {1}, 0,
      [shelf = std::weak_ptr<Shelf>(shelf_), memory = std::move(memory)](void*) mutable {
        if (const auto alive = shelf.lock(); alive != nullptr && !alive->is_inherited()) {
          alive->give_back(std::move(memory));
        }
      },
      options, device);
}

bool MemoryCache::trim(size_t blocks) { return shelf_->trim(blocks); }

int64_t MemoryCache::bytes() const {
  const std::lock_guard lock(shelf_->mutex);
  return shelf_->bytes;
}

}  // namespace torchddp::transport
