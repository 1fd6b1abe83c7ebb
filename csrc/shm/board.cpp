#include "shm/board.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <ctime>
#include <functional>
#include <numeric>

namespace torchddp::shm {

bool Board::is_crowded() const {
  decltype(Header::cpu_mask) all{};
  for (const auto& segment : config_.segments) {
    const auto& mask = reinterpret_cast<const Header*>(segment.base)->cpu_mask;
    std::transform(all.begin(), all.end(), mask.begin(), all.begin(), std::bit_or<>());
  }
  const auto add = [](int processors, uint64_t word) { return processors + std::popcount(word); };
  return std::accumulate(all.begin(), all.end(), 0, add) < size();
}

void Board::ring() const {
  for (int rank = 0; rank < size(); ++rank) {
    auto& peer = header(rank);
    if (peer.sleeping.load() != 0) {  // this rank's too: other threads of it may wait for what this one has done
      peer.doorbell.fetch_add(1);
      syscall(SYS_futex, &peer.doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }
}

void Board::sleep(uint32_t bell, int64_t longest_ns) const {
  const timespec timeout{longest_ns / 1'000'000'000, longest_ns % 1'000'000'000};
  syscall(SYS_futex, &own_header().doorbell, FUTEX_WAIT, bell, &timeout, nullptr, 0);
}

}  // namespace torchddp::shm
