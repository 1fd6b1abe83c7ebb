// Point-to-point messages between ranks, independent of the engine's collectives.
//
// Note [How messages travel]
// A sender writes a letter to a lane in its own segment (one lane per rank) and continues. A small message is stored in the
// letter, a larger one in an envelope, which is a block of the sender's segment. Whenever a receiver is inside a call, it takes
// all letters out of its lanes and keeps those that no receive has asked for yet. So a lane is only full while its receiver
// makes no calls; then further letters wait on the sender's side. A receiver reads an envelope when its message is asked for
// and marks it as read, after which it can be reused. Envelopes are only freed with the segment, so a message can still be read
// long after its sender has gone.
//
// Messages are matched by source and tag, in the order they were sent, with receives in the order they were posted.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shm/engine.h"
#include "shm/segment.h"

namespace torchddp::shm {

// --- in shared memory ---

// Messages up to this size need no envelope.
inline constexpr int64_t kLetterBytes = 488;
inline constexpr uint64_t kLetters = 32;

struct Letter {
  int32_t tag = 0;
  int64_t bytes = 0;
  int64_t envelope = 0;  // location in the sender's segment; 0: the message is in `body`
  std::array<std::byte, kLetterBytes> body;
};

// Between the segment's owner, which alone writes to it, and one other rank.
struct alignas(64) Lane {
  std::atomic<uint64_t> posted;  // letters to that rank
  std::atomic<uint64_t> taken;   // letters from that rank
  std::array<Letter, kLetters> letters;
};

// The message follows it.
struct alignas(64) Envelope {
  std::atomic<uint32_t> is_read;  // written by the receiver
};

// --- in this process ---

// A message being sent or waited for. Only valid to read after Mail has reported that it is done.
struct Message {
  const int peer;  // -1: receive from any rank
  const int32_t tag;
  const int64_t bytes;
  std::byte* const target;  // for a receive; null for a send
  int source = -1;          // of what was received
  std::string problem{};    // why it could not be delivered; later messages may still be
  bool is_done = false;
};
using MessagePtr = std::shared_ptr<Message>;

// Thread-safe. All methods may throw TransportError if the engine has failed, or because of what makes it fail.
class Mail {
 public:
  // All three must outlive it.
  Mail(Engine& engine, Segment& segment);

  // Calls write(memory) for the message before returning. Done as soon as its letter has found room; the receiver is not waited
  // for.
  template <typename Write>
  MessagePtr send(int to, int32_t tag, int64_t bytes, Write&& write);
  // `target` must stay valid until the message is done or forgotten. A size mismatch fails that message only.
  MessagePtr receive(int from, int32_t tag, void* target, int64_t bytes);
  // Cancels a receive that no one waits for any more.
  void forget(const MessagePtr& message);

  bool poll(const MessagePtr& message);
  // Raises an error, for all ranks, if `timeout`, counted from `since`, has passed.
  void wait(const MessagePtr& message, std::chrono::milliseconds timeout,
            Engine::Clock::time_point since = Engine::Clock::now());
  // False if it is not done after `longest`. `spin`: as for Engine::wait_for().
  bool wait_for(const MessagePtr& message, std::chrono::nanoseconds longest, bool spin);
  std::string describe(const Message& message) const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Time = Engine::Clock::time_point;
  struct Outgoing {
    Letter letter;
    MessagePtr message;
  };
  std::byte* prepare(Letter& letter);
  void post(const Letter& letter, const MessagePtr& message);
  void open_box();
  Lane& own_lane(int peer) { return box_[peer]; }
  const Lane* lane_of(int peer);

  bool advance();
  bool push(int to);
  bool take_letters(int from);
  void accept(int from, const Letter& letter);
  void deliver(Message& message, int from, const Letter& letter);
  Envelope* find_envelope(int from, const Letter& letter);
  int64_t lend_envelope(int64_t bytes);
  void collect_envelopes();

  bool is_done(const MessagePtr& message);
  bool wait_until(const MessagePtr& message, Time until, bool spin);
  void sleep(const MessagePtr& message, Time until);
  void check_peers(const MessagePtr& message);
  void run_handlers(SignalWatch& signals, const Message& message);

  Engine& engine_;
  const Board& board_;
  Segment& segment_;
  const int spins_;

  std::mutex mutex_;
  Lane* box_ = nullptr;             // this rank's lanes, by peer
  std::vector<const Lane*> boxes_;  // the peers' lanes for this rank; null until they have a box
  std::vector<std::deque<Outgoing>> outgoing_;
  std::vector<std::deque<Letter>> unread_;  // by source, in the order of their arrival
  std::list<MessagePtr> receives_;          // in the order they were posted
  std::list<std::pair<int64_t, Envelope*>> lent_;
  std::multimap<int64_t, Envelope*> free_;  // by bytes
};

template <typename Write>
MessagePtr Mail::send(int to, int32_t tag, int64_t bytes, Write&& write) {
  const MessagePtr message(new Message{.peer = to, .tag = tag, .bytes = bytes, .target = nullptr});
  Letter letter;
  letter.tag = tag;
  letter.bytes = bytes;
  write(prepare(letter));
  post(letter, message);
  return message;
}

}  // namespace torchddp::shm
