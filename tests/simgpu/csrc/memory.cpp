#include "memory.h"

#include <cstdlib>
#include <new>
#include <utility>

namespace torchddp::sim {
namespace {

constexpr int64_t kUnit = 512;  // as torch's

int64_t rounded_up(int64_t bytes) { return (std::max<int64_t>(bytes, 1) + kUnit - 1) / kUnit * kUnit; }
uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

}  // namespace

Memory::Blocks::iterator Memory::find(const void* data) {
  auto found = blocks_.upper_bound(address(data));
  if (found == blocks_.begin()) return blocks_.end();
  --found;
  return address(data) < found->first + static_cast<uintptr_t>(found->second.bytes) ? found : blocks_.end();
}

void* Memory::allocate(int64_t bytes, Actor stream) {
  const auto rounded = rounded_up(bytes);
  auto& free = free_[{stream, rounded}];
  if (!free.empty()) {
    const auto begin = free.back();
    free.pop_back();
    blocks_.at(begin).live = true;
    return reinterpret_cast<void*>(begin);
  }
  return make(rounded, stream);
}

void* Memory::allocate_for_ever(int64_t bytes) {
  auto* const data = make(rounded_up(bytes), 0);
  find(data)->second.for_ever = true;
  return data;
}

void* Memory::make(int64_t rounded, Actor stream) {
  auto* const data = std::aligned_alloc(kUnit, static_cast<size_t>(rounded));
  if (data == nullptr) throw std::bad_alloc();
  Block block;
  block.bytes = rounded;
  block.stream = stream;
  block.forget_accesses(address(data));
  blocks_.emplace(address(data), std::move(block));
  return data;
}

int64_t Memory::size_of(const void* data) const {
  const auto found = find(data);
  return found == blocks_.end() ? 0 : found->second.bytes;
}

void Memory::defer(const void* data) {
  if (const auto found = find(data); found != blocks_.end()) found->second.deferred = true;
}

void Memory::release(void* data) {
  const auto found = find(data);
  if (found == blocks_.end() || !found->second.live) {
    report_("the release of its memory", "another release");
    return;
  }
  auto& block = found->second;
  if (block.for_ever) return;
  if (block.deferred) {
    deferred_.push_back(found->first);
  } else {
    free_[{block.stream, block.bytes}].push_back(found->first);
  }
  block.live = false;
}

void Memory::device_is_idle() {
  for (const auto begin : std::exchange(deferred_, {})) {
    auto& block = blocks_.at(begin);
    block.deferred = false;
    block.forget_accesses(begin);
    free_[{block.stream, block.bytes}].push_back(begin);
  }
}

void Memory::forget_accesses() {
  device_is_idle();
  free_.clear();
  for (auto found = blocks_.begin(); found != blocks_.end();) {
    auto& [begin, block] = *found;
    if (block.live) {
      block.forget_accesses(begin);
      ++found;
    } else {
      std::free(reinterpret_cast<void*>(begin));
      found = blocks_.erase(found);
    }
  }
}

void Memory::split(Block& block, uintptr_t at) {
  auto piece = block.pieces.upper_bound(at);
  if (piece == block.pieces.begin()) return;
  --piece;
  if (piece->first == at || at >= piece->second.end) return;
  auto right = piece->second;
  piece->second.end = at;
  block.pieces.emplace(at, std::move(right));
}

void Memory::use(const Range& range, const Clock& clock, Moment at, const std::string& what) {
  if (range.bytes == 0) return;
  const auto found = find(range.data);
  if (found == blocks_.end()) return;  // the host's: not ours to watch
  auto& block = found->second;
  if (!block.live) report_("the release of its memory", what);
  const auto begin = address(range.data);
  const auto end = begin + static_cast<uintptr_t>(range.bytes);
  split(block, begin);
  split(block, end);
  for (auto piece = block.pieces.lower_bound(begin); piece != block.pieces.end() && piece->first < end; ++piece) {
    auto& [piece_end, write, reads] = piece->second;
    if (!clock.knows(write.at)) report_(write.what, what);
    if (range.writes) {
      for (const auto& read : reads) {
        if (!clock.knows(read.at)) report_(read.what, what);
      }
      reads.clear();
      write = {at, what};
    } else {
      std::erase_if(reads, [&](const auto& read) { return read.at.actor == at.actor; });
      reads.push_back({at, what});
    }
  }
}

}  // namespace torchddp::sim
