#include "shm/pull.h"

#include <algorithm>
#include <cstring>

namespace torchddp::shm {
constexpr int64_t kPieceBytes = 64 * 1024;
// How much of another rank's block is mapped here at a time: a huge page, where a block has those.
constexpr int64_t kMappedBytes = 2 << 20;
// Smaller blocks stay mapped.
constexpr int64_t kMinUnmapped = 128 * 1024;

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
      if (mine != operation.root) receive();
      return;
    case OpKind::kAllGather:
      for (int rank = 0; rank < size; ++rank) copy(rank * bytes, rank);
      return;
  }
}

// Calls it with ranges of bytes that cover the operation, and unmaps what was read of other ranks' memory. A whole model is read
// through operations with a root; the others mostly read scratch memory, the same again and again.
template <class Read>
void Pull::read_in_parts(Read&& read) {
  const auto bytes = job_.operation.bytes();
  const bool unmaps = job_.operation.kind != OpKind::kAllReduce && bytes >= kMinUnmapped;
  const auto most = unmaps ? kMappedBytes : bytes;
  for (int64_t begin = 0; begin < bytes; begin += most) {
    const auto part = std::min(most, bytes - begin);
    read(begin, part);
    for (int rank = 0; unmaps && rank < job_.board.size(); ++rank) {
      if (rank != job_.rank() && needs(rank)) unmap_pages(inputs_.block(rank) + begin, part);
    }
  }
}

void Pull::receive() {
  auto* const output = static_cast<std::byte*>(job_.operation.output);
  const auto* const input = inputs_.block(job_.operation.root);
  read_in_parts([&](int64_t begin, int64_t bytes) { std::memcpy(output + begin, input + begin, bytes); });
}

void Pull::sum_whole() {
  auto* const output = static_cast<std::byte*>(job_.operation.output);
  const auto item = job_.item();
  const auto sum = [&](int64_t begin, int64_t bytes) {
    void* const target = output + begin;
    inputs_.sum({begin / item, (begin + bytes) / item}, {&target, 1});
  };
  if (!job_.config.is_parallel(job_.operation.bytes())) {
    read_in_parts(sum);
    return;
  }
  read_in_parts([&](int64_t begin, int64_t bytes) {
    Atomic<int64_t> next{begin};
    job_.config.run_parallel(job_.config.threads, [&, end = begin + bytes] {
      for (auto at = next.fetch_add(kPieceBytes); at < end; at = next.fetch_add(kPieceBytes)) {
        sum(at, std::min(kPieceBytes, end - at));
      }
    });
  });
}

}  // namespace torchddp::shm
