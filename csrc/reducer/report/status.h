// Where a step is: written by the threads of training, read by any other, which must never hold those up.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bucket/bucket.h"
#include "reducer/report/peer_processes.h"

namespace torchddp::reducer {

enum class Phase : uint8_t { kIdle, kForward, kBackward };

// Of the backward that the hooks of this step have seen begin.
enum class BackwardEnd : uint8_t { kNone, kRunning, kDone, kFailed };

struct BucketStatus {
  bucket::BucketState state;
  std::vector<int64_t> missing;  // parameters that have produced no gradient in this step
};

// A copy, as Reducer::status() gives it.
struct Status {
  int64_t step = 0;  // synchronised forwards begun
  Phase phase = Phase::kIdle;
  bool waits = false;
  std::string waits_for;
  int64_t bucket = -1;  // waited for; -1: no bucket
  int64_t waited_ns = 0;
  BackwardEnd backward = BackwardEnd::kNone;
  std::string backward_error;
  std::string error;   // of the last step or check that failed
  bool armed = false;  // a synchronised forward has ended, its reduction has not
  bool has_buckets = false;
  std::vector<BucketStatus> buckets;
};

// Thread-safe. Its mutex is held for some assignments, and taken a few times a step, never by a gradient's hook.
class LiveStatus {
 public:
  // `num_ready`: gradients that have come in this step.
  explicit LiveStatus(std::shared_ptr<const std::atomic<int64_t>> num_ready) : num_ready_(std::move(num_ready)) {}

  void begin_forward(int64_t step);
  // The number of this backward, for end_backward().
  int64_t begin_backward();
  // `error`: null if there was none.
  void end_backward(int64_t number, const std::string* error);
  void end_step();
  void abandon_step() { phase_.store(Phase::kIdle, std::memory_order_relaxed); }

  // The number of this wait, for end_wait(). Waits may lie within each other: the innermost is told.
  int64_t begin_wait(std::string what, int64_t bucket);
  void end_wait(int64_t number);

  void set_error(std::string text);
  std::string error() const;

  // What the next error of a transport is to tell besides, one after the other; the step's end without error drops all.
  void note_failure(const std::string& text);
  // `text` of a transport's error, which ranks of this host are gone or stopped, and what was noted, which is forgotten.
  std::string with_note(std::string text);
  // Other ranks of this host, as far as they are known.
  void set_peers(std::vector<PeerProcess> peers);

  // Without `armed` and the buckets.
  Status read() const;

 private:
  struct Wait {
    int64_t number;
    std::string what;
    int64_t bucket;
    int64_t since_ns;
  };

  const std::shared_ptr<const std::atomic<int64_t>> num_ready_;
  std::atomic<Phase> phase_{Phase::kIdle};
  std::atomic<bool> has_note_{false};
  mutable std::mutex mutex_;
  int64_t step_ = 0;
  std::vector<Wait> waits_;  // the innermost is the last
  int64_t wait_number_ = 0;
  int64_t backward_number_ = 0;
  int64_t ready_at_end_ = 0;
  BackwardEnd backward_ = BackwardEnd::kNone;
  std::string backward_error_;
  std::string error_;
  std::string note_;
  std::vector<PeerProcess> peers_;
};

// While it lives, the training thread waits.
class WaitScope {
 public:
  WaitScope(LiveStatus& status, const char* what, int64_t bucket = -1)
      : status_(status), number_(status.begin_wait(what, bucket)) {}
  ~WaitScope() { status_.end_wait(number_); }
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;

 private:
  LiveStatus& status_;
  const int64_t number_;
};

}  // namespace torchddp::reducer
