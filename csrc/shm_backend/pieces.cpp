#include "shm_backend/pieces.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "common/round_up.h"

namespace torchddp::shm_backend {
namespace {

// Measured: below this the whole tensor is as fast.
constexpr int64_t kMinBytes = 4 << 20;
// With smaller pieces ranks meet more often; with larger ones the sums come from memory.
constexpr int64_t kPieceBytes = 1 << 20;
constexpr int64_t kMaxBuffers = 4;
// Each rank reads every rank's input; with more ranks it is better to share the work.
constexpr int kMaxRanks = 4;

}  // namespace

bool sum_for_themselves(const shm::Operation& whole, const shm::Board& board) {
  const bool is_in_place = !shm::is_eager(whole, board) && !board.spans();
  return is_in_place && board.size() > 1 && board.size() <= kMaxRanks && !board.is_crowded();
}

bool may_go_in_pieces(const shm::Operation& whole) { return whole.bytes() >= kMinBytes; }

int64_t piece_buffer_bytes(const shm::Operation& whole) {
  return std::min(kMaxBuffers, ceil_div(whole.bytes(), kPieceBytes)) * kPieceBytes;
}

void sum_in_pieces(ShmTransport& transport, const shm::Operation& whole, const at::Tensor& buffers,
                   std::chrono::milliseconds timeout, const FinishPiece& finish) {
  struct Piece {
    uint64_t seq;
    shm::Operation operation;
    std::byte* buffer;
  };
  auto& engine = transport.engine();
  const auto since = shm::Engine::Clock::now();
  std::deque<Piece> started;
  std::vector<std::byte*> free;  // the last one first, so that as few as possible are touched
  for (auto offset = piece_buffer_bytes(whole) - kPieceBytes; offset >= 0; offset -= kPieceBytes) {
    free.push_back(data_of(buffers) + offset);
  }
  // After this no rank needs its buffer.
  const auto end_oldest = [&] {
    const auto [seq, operation, buffer] = started.front();
    engine.wait(seq, timeout, since);
    if (finish) finish(static_cast<std::byte*>(operation.output), operation.numel);
    started.pop_front();
    free.push_back(buffer);
  };
  const auto item = kernels::item_size(whole.type);
  for (int64_t begin = 0; begin < whole.numel; begin += kPieceBytes / item) {
    while (!started.empty() && (free.empty() || engine.poll(started.front().seq))) end_oldest();
    auto operation = whole;
    operation.form = shm::Form::kEveryone;
    operation.numel = std::min(kPieceBytes / item, whole.numel - begin);
    operation.input = free.back();
    operation.output = static_cast<std::byte*>(whole.output) + begin * item;
    transport.copier().copy(free.back(), operation.output, operation.bytes());
    started.push_back({engine.start(operation), operation, free.back()});
    free.pop_back();
  }
  while (!started.empty()) end_oldest();
}

}  // namespace torchddp::shm_backend
