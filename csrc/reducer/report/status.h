// The progress of a step, and the other ranks' processes: written by the training threads, readable by any other without ever
// holding those up.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bucket/bucket.h"
#include "timeline/timeline.h"

namespace torchddp::reducer {

// Another rank of this host: a closed connection does not say whose it was.
struct PeerProcess {
  int64_t rank = 0;
  int64_t pid = 0;
  int64_t started = 0;  // kernel start time, as the pid may have been reused
};

enum class Phase : uint8_t { kIdle, kForward, kBackward };

struct BucketStatus {
  bucket::BucketState state;
  std::vector<int64_t> missing;  // parameters without a gradient in this step so far
};

// A snapshot, as returned by Reducer::status().
struct Status {
  int64_t step = 0;  // number of synchronized forwards begun
  Phase phase = Phase::kIdle;
  bool waits = false;
  std::string waits_for;
  int64_t bucket = -1;  // the bucket waited for; -1 if none
  int64_t waited_ns = 0;
  std::string error;   // of the last step or check that failed
  bool armed = false;  // a synchronized forward has ended, but its reduction has not
  std::vector<BucketStatus> buckets;
};

// Thread-safe. The mutex is held for a few assignments and taken a few times per step, never in a gradient's hook.
class LiveStatus {
 public:
  void begin_forward(int64_t step) {
    const std::lock_guard lock(mutex_);
    step_ = step;
    phase_.store(Phase::kForward, std::memory_order_relaxed);
  }
  void begin_backward() { phase_.store(Phase::kBackward, std::memory_order_relaxed); }
  void end_step() {
    phase_.store(Phase::kIdle, std::memory_order_relaxed);
    if (!has_note_.load(std::memory_order_relaxed)) return;
    const std::lock_guard lock(mutex_);
    drop_note();
  }
  void abandon_step() { phase_.store(Phase::kIdle, std::memory_order_relaxed); }

  // Returns this wait's number, for end_wait(). Waits may nest; the innermost is reported.
  int64_t begin_wait(std::string what, int64_t bucket) {
    const std::lock_guard lock(mutex_);
    waits_.push_back({++wait_number_, std::move(what), bucket, timeline::now_ns()});
    return wait_number_;
  }
  void end_wait(int64_t number) {
    const std::lock_guard lock(mutex_);
    std::erase_if(waits_, [&](const Wait& wait) { return wait.number == number; });
  }

  void set_error(std::string text) {
    const std::lock_guard lock(mutex_);
    error_ = std::move(text);
  }
  std::string error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  // Text to add to the next transport error. Texts accumulate; a step that ends without an error drops them.
  void note_failure(const std::string& text) {
    const std::lock_guard lock(mutex_);
    note_ += (note_.empty() ? "" : "\n") + text;
    has_note_.store(true, std::memory_order_relaxed);
  }
  // `text` of a transport error, plus the ranks of this host that are gone or stopped, plus the noted texts, which are then
  // dropped.
  std::string with_note(std::string text);
  // The other ranks of this host, as far as they are known.
  void set_peers(std::vector<PeerProcess> peers) {
    const std::lock_guard lock(mutex_);
    peers_ = std::move(peers);
  }

  // Leaves out `armed` and the buckets.
  Status read() const {
    const std::lock_guard lock(mutex_);
    Status status;
    status.step = step_;
    status.phase = phase_.load(std::memory_order_relaxed);
    status.waits = !waits_.empty();
    if (status.waits) {
      const auto& wait = waits_.back();
      status.waits_for = wait.what;
      status.bucket = wait.bucket;
      status.waited_ns = timeline::now_ns() - wait.since_ns;
    }
    status.error = error_;
    return status;
  }

 private:
  void drop_note() {  // under the mutex
    note_.clear();
    has_note_.store(false, std::memory_order_relaxed);
  }

  struct Wait {
    int64_t number;
    std::string what;
    int64_t bucket;
    int64_t since_ns;
  };

  std::atomic<Phase> phase_{Phase::kIdle};
  std::atomic<bool> has_note_{false};
  mutable std::mutex mutex_;
  int64_t step_ = 0;
  std::vector<Wait> waits_;  // innermost last
  int64_t wait_number_ = 0;
  std::string error_;
  std::string note_;
  std::vector<PeerProcess> peers_;
};

// Marks the training thread as waiting for as long as it lives.
class WaitScope {
 public:
  WaitScope(LiveStatus& status, const char* what, int64_t bucket = -1)
      : status_(status), number_(status.begin_wait(what, bucket)) {}
  ~WaitScope() { status_.end_wait(number_); }
  WaitScope& operator=(WaitScope&&) = delete;

 private:
  LiveStatus& status_;
  const int64_t number_;
};

}  // namespace torchddp::reducer
