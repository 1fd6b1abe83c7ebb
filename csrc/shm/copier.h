// Copies to memory that other processes read.
//
// Note [Past the caches or not]
// A store to a line that a peer has read first takes the line out of that peer's cache. Between cores that share a last-level
// cache this is free: the peer finds the copy in that cache and memory is not touched, so it takes half the time of
// non-temporal stores. Between cores without a common cache it takes up to ten times as long as the copy, line after line, and
// non-temporal stores are best. Which case applies depends on where the ranks run, and on a virtual machine that changes over
// time. So it is measured by the copies themselves, for each size.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <mutex>

namespace torchddp::shm {

// Learns which of two ways to do something is faster, where that depends on the machine and changes over time.
//
// Takes the faster way and tries the other now and then; more rarely if it was no better the last times, so that even one that
// takes ten times as long costs only a percent or two. Not thread-safe.
class Quicker {
 public:
  // The way to take now: 0, the initial choice, or 1.
  int choice() const { return trials_ > 0 ? 1 - best_ : best_; }

  // What it cost, in any unit, for a comparable amount of work.
  void took(int choice, double cost) {
    auto& known = cost_[choice];
    // Being descheduled makes a run look slow, so rare slow results are trusted slowly.
    known = cost < known ? cost : known + (std::min(cost, 2 * known) - known) / 8;
    if (choice == best_) {
      const bool has_changed = known > kChange * at_decision_;
      if (trials_ == 0 && (--until_trial_ <= 0 || has_changed)) {
        trials_ = kTrials;
        cost_[1 - best_] = kUnknown;
      }
    } else if (trials_ > 0 && --trials_ == 0) {
      decide();
    }
  }

 private:
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();
  // The first few find the caches as the better way left them.
  static constexpr int kTrials = 6;
  static constexpr int kFirstPause = 16;
  static constexpr int kLongestPause = 4096;
  static constexpr double kMargin = 0.9;
  static constexpr double kChange = 1.5;

  void decide() {
    const auto other = static_cast<size_t>(1 - best_);
    if (cost_[other] < kMargin * cost_[1 - other]) {
      best_ = 1 - best_;
      pause_ = kFirstPause;
    } else {
      pause_ = std::min(2 * pause_, kLongestPause);
    }
    until_trial_ = pause_;
    at_decision_ = cost_[best_];
  }

  std::array<double, 2> cost_{kUnknown, kUnknown};
  double at_decision_ = kUnknown;  // of the better way
  int best_ = 0;
  int trials_ = 0;
  int pause_ = kFirstPause;
  int until_trial_ = kTrials;
};

// Thread-safe.
class Copier {
 public:
  // Like memcpy. A thread that sees a store made after this call also sees the copy.
  void copy(void* to, const void* from, int64_t bytes);

 private:
  // Powers of two, in kilobytes; the last one covers everything larger.
  static constexpr int kSizes = 16;

  std::mutex mutex_;
  std::array<Quicker, kSizes> quicker_;
};

// The same with non-temporal stores.
void stream_copy(void* to, const void* from, int64_t bytes);

}  // namespace torchddp::shm
