#include "shm_backend/pieces.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "common/round_up.h"

namespace torchddp::shm_backend {
namespace {

using Clock = shm::Engine::Clock;

// Measured: below this the whole tensor is as fast.
constexpr int64_t kMinBytes = 4 << 20;
// With smaller pieces ranks meet more often; with larger ones the sums come from memory.
constexpr int64_t kPieceBytes = 1 << 20;
constexpr int64_t kMaxBuffers = 4;
// Each rank reads every rank's input; with more ranks it is better to share the work.
constexpr int kMaxRanks = 4;

class Run {
 public:
  Run(const Pieces& pieces, ShmTransport& transport, const at::Tensor& buffers)
      : pieces_(pieces), engine_(transport.engine()), copier_(transport.copier()),
        item_(kernels::item_size(pieces.whole.type)) {
    for (auto offset = pieces.bytes() - kPieceBytes; offset >= 0; offset -= kPieceBytes) {
      free_.push_back(data_of(buffers) + offset);
    }
  }

  void run() {
    const auto each = kPieceBytes / item_;
    const auto numel = pieces_.whole.numel;
    for (int64_t begin = 0; begin < numel; begin += each) {
      while (!started_.empty() && (free_.empty() || engine_.poll(started_.front().seq))) {
        end_oldest();
      }
      start(pieces_.memory + begin * item_, std::min(each, numel - begin));
    }
    while (!started_.empty()) end_oldest();
  }

 private:
  struct Piece {
    uint64_t seq;
    std::byte* buffer;
    std::byte* place;  // in the tensor
    int64_t numel;
  };

  void start(std::byte* place, int64_t numel) {
    auto* const buffer = free_.back();
    copier_.copy(buffer, place, numel * item_);
    auto operation = pieces_.whole;
    operation.form = shm::Form::kEveryone;
    operation.numel = numel;
    operation.input = buffer;
    operation.output = place;
    started_.push_back({engine_.start(operation), buffer, place, numel});
    free_.pop_back();
  }

  // After this no rank needs its buffer.
  void end_oldest() {
    const auto [seq, buffer, place, numel] = started_.front();
    engine_.wait(seq, pieces_.timeout, since_);
    if (pieces_.finish) pieces_.finish(place, numel);
    started_.pop_front();
    free_.push_back(buffer);
  }

  const Pieces& pieces_;
  shm::Engine& engine_;
  shm::Copier& copier_;
  const Clock::time_point since_ = Clock::now();
  const int64_t item_;
  std::vector<std::byte*> free_;  // the last one first, so that as few as possible are touched
  std::deque<Piece> started_;
};

}  // namespace

bool Pieces::sum_for_themselves(const shm::Operation& whole, const shm::Board& board) {
  const bool is_in_place = !shm::is_eager(whole, board) && !board.spans();
  return is_in_place && board.size() > 1 && board.size() <= kMaxRanks && !board.is_crowded();
}

bool Pieces::are_used(const shm::Operation& whole) { return whole.bytes() >= kMinBytes; }

int64_t Pieces::bytes() const { return std::min(kMaxBuffers, ceil_div(whole.bytes(), kPieceBytes)) * kPieceBytes; }

void Pieces::run(ShmTransport& transport, const at::Tensor& buffers) const { Run(*this, transport, buffers).run(); }

}  // namespace torchddp::shm_backend
