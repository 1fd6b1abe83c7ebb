#include "shm/segment.h"

#include <algorithm>

#include "model/memory.h"
#include "shm/layout.h"

namespace torchddp::shm {

void Segment::write_header(int64_t offset) {
  std::fill_n(base_ + offset, sizeof(Header), std::byte{0});
  auto& header = *reinterpret_cast<Header*>(base_ + offset);
  header.rank = rank_;
  header.size = size_;
  header.cpu_mask.fill(UINT64_MAX);
  model::initialize(header.state, static_cast<uint32_t>(RankState::kOpen));
  model::initialize(header.culprit, -1);
  model::renew(&header, sizeof(Header));
}

void* Segment::allocate(int64_t bytes) {
  if (!released_.empty()) {
    auto* const again = released_.back();
    released_.pop_back();
    return again;
  }
  const auto begin = end_;
  if (begin + bytes > bytes_) return nullptr;
  end_ = begin + (bytes + 63) / 64 * 64;
  return base_ + begin;
}

}  // namespace torchddp::shm
