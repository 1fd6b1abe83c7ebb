#include "shm/pull.h"

#include <algorithm>
#include <cstring>

namespace torchddp::shm {
constexpr int64_t kPieceBytes = 64 * 1024;

bool Pull::needs(int rank) const {
  const auto& operation = job_.operation;
  if (operation.kind == OpKind::kBroadcast) return rank == operation.root;
  return reads(job_.rank());
}

bool Pull::work() {
  const bool found = job_.board.all_from(next_input_, [&](int rank) { return !needs(rank) || inputs_.find(rank); });
  if (found) move();
  return found;
}

bool Pull::is_complete() {
  const bool offers = needs(job_.rank()) || job_.operation.kind == OpKind::kReduce;
  if (is_eager(job_.operation, job_.board) || !offers) return true;
  return job_.board.all_from(next_done_, [&](int rank) { return !reads(rank) || job_.done.has(rank, job_.seq); });
}

bool Pull::waits_for(int rank, bool is_worked) const {
  return is_worked ? reads(rank) && job_.board.header(rank).done.load() <= job_.seq
                   : needs(rank) && !job_.has_posted(rank);
}

void Pull::move() {
  const auto& operation = job_.operation;
  void* const output = operation.output;
  const int mine = job_.rank();
  const int size = job_.board.size();
  const auto bytes = operation.bytes();
  const auto copy = [&](int64_t to, int rank) {
    if (bytes > 0) std::memcpy(static_cast<std::byte*>(output) + to, inputs_.block(rank), bytes);
  };
  switch (operation.kind) {
    case OpKind::kAllReduce:
      if (operation.form == Form::kQuestion) {
        if (output != nullptr) *static_cast<bool*>(output) = inputs_.all_accept();
        return;
      }
      sum_whole();
      return;
    case OpKind::kReduceScatter: {
      const auto numel = operation.numel / size;
      inputs_.sum({mine * numel, (mine + 1) * numel}, {&output, 1});
      return;
    }
    case OpKind::kReduce:
      if (mine == operation.root) sum_whole();
      return;
    case OpKind::kBroadcast:
      if (mine != operation.root) copy(0, operation.root);
      return;
    case OpKind::kAllGather:
      for (int rank = 0; rank < size; ++rank) copy(rank * bytes, rank);
      return;
  }
}

void Pull::sum_whole() {
  const auto& operation = job_.operation;
  const auto sum = [&](int64_t begin, int64_t end) {
    void* const target = static_cast<std::byte*>(operation.output) + begin * job_.item();
    inputs_.sum({begin, end}, {&target, 1});
  };
  if (!job_.config.is_parallel(operation.bytes())) {
    sum(0, operation.numel);
    return;
  }
  const auto piece = kPieceBytes / job_.item();
  Atomic<int64_t> next{0};
  job_.config.run_parallel(job_.config.threads, [&] {
    for (auto begin = next.fetch_add(piece); begin < operation.numel; begin = next.fetch_add(piece)) {
      sum(begin, std::min(operation.numel, begin + piece));
    }
  });
}

}  // namespace torchddp::shm
