#include "shm/board.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <functional>

#include "shm/processors.h"

namespace torchddp::shm {
namespace {

std::vector<int> nodes_of(const EngineConfig& config) {
  std::vector<int> nodes;
  for (const auto& segment : config.segments) {
    nodes.push_back(reinterpret_cast<const Header*>(segment.base)->node);
  }
  return nodes;
}

}  // namespace

Board::Board(const EngineConfig& config) : config_(config), groups_(nodes_of(config)) {}

bool Board::is_crowded() const {
  ProcessorMask all{};
  int least = INT_MAX;
  for (const auto& segment : config_.segments) {
    const auto& header = *reinterpret_cast<const Header*>(segment.base);
    std::transform(all.begin(), all.end(), header.cpu_mask.begin(), all.begin(), std::bit_or<>());
    least =
        header.quota > 0 ? std::min(least, header.quota) : least;  // that of one group, as a rule, with all ranks in it
  }
  return std::min(shm::count(all), least) < size();
}

void Board::ring() const {
  if (has_sleepers()) {
    auto& bell = header(0).doorbell;
    bell.fetch_add(1);
    syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

uint32_t Board::lie_down() const {
  header(0).sleeping.fetch_add(1);
  return header(0).doorbell.load();
}

void Board::sleep(uint32_t bell, int64_t longest_ns) const {
  const timespec timeout{longest_ns / 1'000'000'000, longest_ns % 1'000'000'000};
  syscall(SYS_futex, &header(0).doorbell, FUTEX_WAIT, bell, &timeout, nullptr, 0);
}

}  // namespace torchddp::shm
