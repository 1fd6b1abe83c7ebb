#include "transport/shm/gradient_pool.h"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <functional>

namespace torchddp::transport {
namespace {

// What a block in use belongs to.
struct Loan {
  std::shared_ptr<GradientPool> pool;
  int64_t bytes;
};

// Installed in front of torch's CPU allocator; see Note [Gradients born in shared memory].
class PoolAllocator final : public c10::Allocator {
 public:
  explicit PoolAllocator(c10::Allocator* torch) : torch_(torch) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (active_.load(std::memory_order_relaxed) != 0 && bytes >= static_cast<size_t>(GradientPool::kMinBytes)) {
      if (auto data = allocate_from_pools(static_cast<int64_t>(bytes))) return data;
    }
    return torch_->allocate(bytes);
  }
  // For raw_allocate(), whose memory is identified by its address alone.
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { default_copy_data(dest, src, count); }

  void add(const std::shared_ptr<GradientPool>& pool) {
    const std::lock_guard lock(mutex_);
    pools_.push_back(pool);
    active_.store(pools_.size(), std::memory_order_relaxed);
  }
  void remove(const GradientPool* pool) {
    const std::lock_guard lock(mutex_);
    std::erase_if(pools_, [&](const std::weak_ptr<GradientPool>& other) {
      const auto alive = other.lock();
      return alive == nullptr || alive.get() == pool;
    });
    active_.store(pools_.size(), std::memory_order_relaxed);
  }

  static PoolAllocator& instance() {
    // Never destroyed: tensors may outlive whatever runs at exit.
    static auto* const allocator = [] {
      auto* made = new PoolAllocator(c10::GetCPUAllocator());
      c10::SetCPUAllocator(made);
      // Makes sure that no other thread is inside while the process forks. The child starts without pools.
      pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                     [] {
                       instance().pools_.clear();
                       instance().active_.store(0, std::memory_order_relaxed);
                       instance().mutex_.unlock();
                     });
      return made;
    }();
    return *allocator;
  }

 private:
  c10::DataPtr allocate_from_pools(int64_t bytes) {
    std::vector<std::weak_ptr<GradientPool>> pools;
    {
      const std::lock_guard lock(mutex_);
      pools = pools_;
    }
    for (const auto& weak : pools) {
      const auto pool = weak.lock();
      auto* block = pool != nullptr ? pool->take(bytes) : nullptr;
      if (block != nullptr) {
        const std::lock_guard lock(mutex_);
        loans_.emplace(block, Loan{pool, bytes});
        return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
      }
    }
    return {};
  }

  static void release(void* memory) {
    auto& self = instance();
    Loan loan{};
    {
      const std::lock_guard lock(self.mutex_);
      const auto found = self.loans_.find(memory);
      if (found != self.loans_.end()) {
        loan = std::move(found->second);
        self.loans_.erase(found);
      }
    }
    if (loan.pool != nullptr) {
      loan.pool->give_back(memory, loan.bytes);
    } else {
      self.torch_->raw_deleter()(memory);
    }
  }

  c10::Allocator* torch_;
  std::atomic<size_t> active_{0};
  std::mutex mutex_;
  std::vector<std::weak_ptr<GradientPool>> pools_;
  std::unordered_map<void*, Loan> loans_;
};

}  // namespace

void GradientPool::expect(std::span<const int64_t> sizes) {
  if (is_inherited()) return;
  const std::lock_guard lock(mutex_);
  for (auto& [bytes, shelf] : shelves_) shelf.expected = 0;
  for (const auto bytes : sizes) {
    if (bytes >= kMinBytes) ++shelves_[bytes].expected;
  }
  std::erase_if(shelves_, [&](const auto& entry) {
    const auto& shelf = entry.second;
    if (shelf.expected > 0) return false;
    for (auto* block : shelf.free) segment_->release(block);
    return true;
  });
}

void GradientPool::set_active(bool active) {
  if (is_inherited()) return;
  const std::lock_guard lock(mutex_);
  if (active == active_ || (active && shelves_.empty())) return;
  active_ = active;
  if (active) {
    PoolAllocator::instance().add(shared_from_this());
  } else {
    PoolAllocator::instance().remove(this);
  }
}

void GradientPool::trim(int64_t bytes) {
  if (is_inherited()) return;
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> sizes;
  int64_t free = 0;
  for (const auto& [size, shelf] : shelves_) {
    sizes.push_back(size);
    free += size * std::ssize(shelf.free);
  }
  std::ranges::sort(sizes, std::greater<>());
  for (const auto size : sizes) {
    auto& shelf = shelves_[size];
    for (; free > bytes && !shelf.free.empty(); free -= size) {
      segment_->release(shelf.free.back());
      shelf.free.pop_back();
      --shelf.blocks;
    }
  }
}

void* GradientPool::take(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = shelves_.find(bytes);
  if (found == shelves_.end()) return nullptr;
  auto& shelf = found->second;
  if (!shelf.free.empty()) {
    auto* block = shelf.free.back();
    shelf.free.pop_back();
    return block;
  }
  if (shelf.blocks >= shelf.expected + kSpare) return nullptr;
  auto* block = segment_->allocate(bytes);
  shelf.blocks += block != nullptr ? 1 : 0;
  return block;
}

void GradientPool::give_back(void* block, int64_t bytes) {
  if (is_inherited()) return;
  const std::lock_guard lock(mutex_);
  const auto found = shelves_.find(bytes);
  if (found != shelves_.end() && found->second.blocks <= found->second.expected + kSpare) {
    found->second.free.push_back(block);
    return;
  }
  if (found != shelves_.end()) --found->second.blocks;
  segment_->release(block);
}

}  // namespace torchddp::transport
