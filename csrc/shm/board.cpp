#include "shm/board.h"

#include "shm/processors.h"

namespace torchddp::shm {

bool Board::is_crowded() const {
  std::vector<Allowance> of_ranks;
  for (int rank = 0; rank < size(); ++rank) {
    const auto& of_rank = header(rank);
    of_ranks.push_back({of_rank.cpu_mask, {of_rank.quota, of_rank.quota_group}});
  }
  return is_too_little(of_ranks);
}

void Board::ring() const {
  if (has_sleepers()) {
    auto& bell = header(0).doorbell;
    bell.fetch_add(1);
    wake_all(bell);
  }
}

uint32_t Board::begin_sleep() const {
  header(0).sleeping.fetch_add(1);
  return header(0).doorbell.load();
}

void Board::sleep(uint32_t bell, int64_t longest_ns) const { sleep_on(header(0).doorbell, bell, longest_ns); }

}  // namespace torchddp::shm
