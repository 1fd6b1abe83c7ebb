#include "shm/mail.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "common/deadline.h"
#include "common/errors.h"
#include "shm/waiting.h"

namespace torchddp::shm {
namespace {

using std::chrono::milliseconds;
using Clock = Engine::Clock;

// The limit for idle envelopes.
constexpr int64_t kFreeBytes = 64 << 20;
constexpr auto kEnvelopeBytes = static_cast<int64_t>(sizeof(Envelope));

bool matches(const Message& receive, int from, const Letter& letter) {
  return (receive.peer < 0 || receive.peer == from) && receive.tag == letter.tag;
}

// Copies what is used of it. A peer may change `from` meanwhile; `to` is what counts.
void copy(Letter& to, const Letter& from) {
  to.tag = from.tag;
  to.bytes = from.bytes;
  to.envelope = from.envelope;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (to.envelope == 0) {
    std::memcpy(to.body.data(), from.body.data(), static_cast<size_t>(std::clamp<int64_t>(to.bytes, 0, kLetterBytes)));
  }
}

std::byte* content(Envelope* envelope) { return reinterpret_cast<std::byte*>(envelope + 1); }

}  // namespace

Mail::Mail(Engine& engine, Segment& segment)
    : engine_(engine),
      board_(engine.board()),
      segment_(segment),
      spins_(board_.is_crowded() ? kCrowdedSpins : kSpins),
      boxes_(static_cast<size_t>(board_.size())),
      outgoing_(boxes_.size()),
      unread_(boxes_.size()) {}

std::string Mail::describe(const Message& message) const {
  const bool receives = message.target != nullptr;
  return std::string(receives ? "recv" : "send") + " of " + std::to_string(message.bytes) + " bytes " +
         (receives ? "from " : "to ") + (message.peer < 0 ? "any rank" : board_.name(message.peer)) + " (tag " +
         std::to_string(message.tag) + ")";
}

// Where to write the message.
std::byte* Mail::prepare(Letter& letter) {
  engine_.check();
  const Lock lock(mutex_);
  open_box();
  if (letter.bytes <= kLetterBytes) {
    return letter.body.data();
  }
  letter.envelope = lend_envelope(letter.bytes);
  return board_.base(board_.rank()) + letter.envelope + kEnvelopeBytes;
}

void Mail::post(const Letter& letter, const MessagePtr& message) {
  const Lock lock(mutex_);
  outgoing_[static_cast<size_t>(message->peer)].push_back({letter, message});
  push(message->peer);
}

MessagePtr Mail::receive(int from, int32_t tag, void* target, int64_t bytes) {
  engine_.check();
  static std::byte nothing;  // an empty tensor has no memory
  auto* const memory = target != nullptr ? static_cast<std::byte*>(target) : &nothing;
  const MessagePtr message(new Message{.peer = from, .tag = tag, .bytes = bytes, .target = memory});
  const Lock lock(mutex_);
  open_box();
  const int first = std::max(from, 0);
  const int last = from < 0 ? board_.size() : from + 1;
  for (int rank = first; rank < last; ++rank) {
    auto& letters = unread_[static_cast<size_t>(rank)];
    const auto found =
        std::find_if(letters.begin(), letters.end(), [&](const Letter& letter) { return letter.tag == tag; });
    if (found != letters.end()) {
      deliver(*message, rank, *found);
      letters.erase(found);
      return message;
    }
  }
  receives_.push_back(message);
  advance();
  return message;
}

void Mail::forget(const MessagePtr& message) {
  const Lock lock(mutex_);
  receives_.remove(message);
}

// The contents of a fresh block are unspecified.
void Mail::open_box() {
  if (box_ != nullptr) {
    return;
  }
  void* const memory = segment_.allocate(board_.size() * static_cast<int64_t>(sizeof(Lane)));
  if (memory == nullptr) {
    throw TransportError(board_.name(board_.rank()) +
                         " has no room in its shared memory for messages: " + std::strerror(errno));
  }
  box_ = static_cast<Lane*>(memory);
  for (int peer = 0; peer < board_.size(); ++peer) {
    new (box_ + peer) Lane{};
  }
  board_.own_header().mail.store(segment_.offset_of(memory));
}

// A peer's lane for this rank; null until that peer has sent or received something.
const Lane* Mail::lane_of(int peer) {
  auto& lane = boxes_[static_cast<size_t>(peer)];
  if (lane == nullptr) {
    const auto offset = board_.header(peer).mail.load();
    if (offset == 0) {
      return nullptr;
    }
    if (offset % 64 != 0 || !board_.holds(peer, offset, board_.size() * static_cast<int64_t>(sizeof(Lane)))) {
      engine_.give_up(board_.name(peer) + " has its messages outside its segment", peer);
    }
    lane = reinterpret_cast<const Lane*>(board_.base(peer) + offset) + board_.rank();
  }
  return lane;
}

// True if anything moved.
bool Mail::advance() {
  bool moved = false;
  for (int peer = 0; peer < board_.size(); ++peer) {
    if (peer != board_.rank()) {
      moved |= take_letters(peer);
      moved |= push(peer);
    }
  }
  return moved;
}

bool Mail::push(int to) {
  auto& queue = outgoing_[static_cast<size_t>(to)];
  if (queue.empty()) {
    return false;
  }
  auto& lane = own_lane(to);
  const auto* theirs = lane_of(to);
  const auto before = lane.posted.load();
  auto posted = before;
  while (!queue.empty() && posted - (theirs != nullptr ? theirs->taken.load() : 0) < kLetters) {
    auto& [letter, message] = queue.front();
    copy(lane.letters[posted % kLetters], letter);
    lane.posted.store(++posted);
    message->is_done = true;
    queue.pop_front();
  }
  if (posted == before) {
    return false;
  }
  board_.ring();
  return true;
}

bool Mail::take_letters(int from) {
  const auto* theirs = lane_of(from);
  if (theirs == nullptr || box_ == nullptr) {
    return false;
  }
  auto& taken = own_lane(from).taken;
  const auto before = taken.load();
  const auto posted = theirs->posted.load();
  if (posted == before) {
    return false;
  }
  if (posted - before > kLetters) {
    engine_.give_up(board_.name(from) + " reports more messages than it can have sent", from);
  }
  for (auto number = before; number < posted; ++number) {
    Letter letter;
    copy(letter, theirs->letters[number % kLetters]);
    accept(from, letter);
    taken.store(number + 1);
  }
  // The sender may be waiting for room, or another thread of this rank for a message.
  if (theirs->posted.load() - before >= kLetters || board_.has_sleepers()) {
    board_.ring();
  }
  return true;
}

void Mail::accept(int from, const Letter& letter) {
  const bool inside = letter.bytes >= 0 &&
                      (letter.envelope == 0 ? letter.bytes <= kLetterBytes : find_envelope(from, letter) != nullptr);
  if (!inside) {
    engine_.give_up(board_.name(from) + " offers a message that is not in its segment", from);
  }
  const auto receive = std::find_if(receives_.begin(), receives_.end(),
                                    [&](const MessagePtr& message) { return matches(*message, from, letter); });
  if (receive == receives_.end()) {
    unread_[static_cast<size_t>(from)].push_back(letter);
    return;
  }
  deliver(**receive, from, letter);
  receives_.erase(receive);
}

void Mail::deliver(Message& message, int from, const Letter& letter) {
  message.source = from;
  auto* const envelope = letter.envelope == 0 ? nullptr : find_envelope(from, letter);
  if (letter.bytes == message.bytes) {
    std::memcpy(message.target, envelope == nullptr ? letter.body.data() : content(envelope),
                static_cast<size_t>(letter.bytes));
  } else {
    message.problem = describe(message) + " got " + std::to_string(letter.bytes) +
                      " bytes, which are lost: sender and receiver must give tensors of the same size";
  }
  if (envelope != nullptr) {
    envelope->is_read.store(1);
  }
  message.is_done = true;
}

// Null if it is not in that rank's segment.
Envelope* Mail::find_envelope(int from, const Letter& letter) {
  const bool inside = letter.envelope % 64 == 0 && letter.bytes <= INT64_MAX - kEnvelopeBytes &&
                      board_.holds(from, letter.envelope, kEnvelopeBytes + letter.bytes);
  return inside ? reinterpret_cast<Envelope*>(board_.base(from) + letter.envelope) : nullptr;
}

// Returns its offset in this rank's segment.
int64_t Mail::lend_envelope(int64_t bytes) {
  collect_envelopes();
  auto size = bytes + kEnvelopeBytes;
  void* memory = nullptr;
  if (const auto found = free_.lower_bound(size); found != free_.end() && found->first <= 2 * size) {
    size = found->first;
    memory = found->second;
    free_.erase(found);
  } else if (memory = segment_.allocate(size); memory == nullptr) {
    for (const auto& [unused, envelope] : std::exchange(free_, {})) {
      segment_.release(envelope);
    }
    memory = segment_.allocate(size);
  }
  if (memory == nullptr) {
    throw TransportError(board_.name(board_.rank()) + " has no room in its shared memory for a message of " +
                         std::to_string(bytes) + " bytes: " + std::strerror(errno));
  }
  lent_.emplace_back(size, new (memory) Envelope{});
  return segment_.offset_of(memory);
}

// Reclaims the ones that were read.
void Mail::collect_envelopes() {
  for (auto it = lent_.begin(); it != lent_.end();) {
    if (it->second->is_read.load() == 0) {
      ++it;
      continue;
    }
    free_.insert(*it);
    it = lent_.erase(it);
  }
  int64_t bytes = 0;
  for (auto it = free_.begin(); it != free_.end();) {
    bytes += it->first;
    if (bytes <= kFreeBytes) {
      ++it;
      continue;
    }
    segment_.release(it->second);
    it = free_.erase(it);
  }
}

// --- waiting ---

bool Mail::is_done(const MessagePtr& message) {
  const Lock lock(mutex_);
  if (!message->is_done) {
    advance();
  }
  return message->is_done;
}

bool Mail::poll(const MessagePtr& message) {
  engine_.check();
  if (is_done(message)) {
    return true;
  }
  check_peers(message);
  return is_done(message);
}

void Mail::wait(const MessagePtr& message, milliseconds timeout, Time since) {
  if (!wait_until(message, deadline_after(timeout, since), true)) {
    engine_.give_up("timed out after " + std::to_string(timeout.count()) + " ms in " + describe(*message) +
                        ". A peer is stopped, or did not call the matching " +
                        (message->target != nullptr ? "send" : "recv"),
                    message->peer);
  }
}

bool Mail::wait_for(const MessagePtr& message, std::chrono::nanoseconds longest, bool spin) {
  return wait_until(message, deadline_after(longest), spin);
}

bool Mail::wait_until(const MessagePtr& message, Time until, bool spin) {
  engine_.check();
  const auto begin = Clock::now();
  auto next_check = begin + kPeerCheck;
  SignalWatch signals(begin);
  for (int idle = spin ? 0 : spins_; !is_done(message); ++idle) {
    engine_.progress();
    if (idle < spins_) {
      pause_cpu();
      continue;
    }
    sleep(message, std::min(until, next_check));
    const auto now = Clock::now();
    if (now < next_check && now < until) {
      continue;
    }
    next_check = now + kPeerCheck;
    check_peers(message);
    if (now >= until) {
      return is_done(message);
    }
    if (spin && signals.is_due(now)) {
      run_handlers(signals, *message);
    }
  }
  return true;
}

// Sleeps until the doorbell rings.
void Mail::sleep(const MessagePtr& message, Time until) {
  const auto bell = board_.lie_down();
  try {
    engine_.check();
    // A peer that posted before it could see us asleep is noticed here.
    if (!is_done(message)) {
      const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(until - Clock::now()).count();
      board_.sleep(bell, std::clamp<int64_t>(left, 1, kSleepNs));
    }
  } catch (...) {
    board_.rise();
    throw;
  }
  board_.rise();
}

// Throws if no rank is left that could do the other part. What a rank sent before it left can still be read.
void Mail::check_peers(const MessagePtr& message) {
  int last_left = -1;
  bool all_left = true;
  for (int peer = 0; peer < board_.size(); ++peer) {
    if (peer == board_.rank() || (message->peer >= 0 && peer != message->peer)) {
      continue;
    }
    const bool left = engine_.has_left(peer);
    all_left &= left;
    last_left = left && (last_left < 0 || board_.state(peer) != RankState::kClosed) ? peer : last_left;
  }
  const bool hopeless = all_left || (last_left >= 0 && board_.state(last_left) != RankState::kClosed);
  if (hopeless && !is_done(message)) {
    engine_.give_up_on(last_left, describe(*message));
  }
}

// As in Engine: if a handler raises, the peers must not wait for this thread.
void Mail::run_handlers(SignalWatch& signals, const Message& message) {
  try {
    signals.look();
  } catch (...) {
    engine_.interrupt(board_.name(board_.rank()) + " gave up: a signal handler raised an exception in " +
                      describe(message));
    throw;
  }
}

}  // namespace torchddp::shm
