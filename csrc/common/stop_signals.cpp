#include "common/stop_signals.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <stdexcept>
#include <string>

namespace torchddp {
namespace {

constexpr int64_t kSameRequestNs = 2'000'000'000;
constexpr int kSignals = 65;

// Handlers may read these at any time.
std::array<struct sigaction, kSignals> before;
std::array<std::atomic<bool>, kSignals> is_caught;
std::atomic<int> noted{0};
std::atomic<int64_t> noted_at_ns{0};
std::atomic<pid_t> made_by{0};
std::atomic<bool> catches{false};

static_assert(std::atomic<int64_t>::is_always_lock_free, "signal handlers may not wait for locks");

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // safe in a signal handler, unlike std::chrono by its specification
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

void do_as_before(int number, siginfo_t* info, void* context) {
  const auto& action = before.at(number);
  if ((action.sa_flags & SA_SIGINFO) != 0) {
    action.sa_sigaction(number, info, context);
  } else if (action.sa_handler == SIG_DFL) {
    sigaction(number, &action, nullptr);
    raise(number);  // takes effect when this handler returns
  } else if (action.sa_handler != SIG_IGN) {
    action.sa_handler(number);
  }
}

extern "C" void note_stop_signal(int number, siginfo_t* info, void* context) {
  const int error = errno;
  const int64_t now = now_ns();
  int64_t since = 0;
  const bool in_child = getpid() != made_by;
  if (in_child && (info->si_pid == getppid() || info->si_pid == getpid())) {
    do_as_before(number, info, context);
  } else if (noted_at_ns.compare_exchange_strong(since, now)) {
    noted.store(number);
  } else if (now - since > kSameRequestNs) {
    do_as_before(number, info, context);
  }
  errno = error;
}

}  // namespace

void catch_stop_signals(const std::vector<int>& numbers, bool for_parent) {
  const bool inherited = getpid() != made_by;
  if (catches && !inherited) {
    throw std::logic_error(
        "this process already catches signals that ask it to stop: another StopTogether is active. Pass all models to "
        "one, StopTogether(a, b), or close() the first");
  }
  release_stop_signals(/*heeded=*/inherited);
  catches = true;
  made_by = for_parent ? 0 : getpid();
  for (const int number : numbers) {
    struct sigaction action{};
    action.sa_sigaction = &note_stop_signal;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    sigemptyset(&action.sa_mask);
    struct sigaction found{};
    const bool exists = number > 0 && number < kSignals && sigaction(number, nullptr, &found) == 0;
    if (exists && is_caught.at(number).exchange(true)) continue;
    if (exists) before.at(number) = found;
    if (!exists || sigaction(number, &action, nullptr) != 0) {
      release_stop_signals(false);
      throw std::invalid_argument("signal " + std::to_string(number) + " can't be caught");
    }
  }
}

int noted_stop_signal() { return noted.load(); }

void pass_on_stop_signal(int number) {
  if (number <= 0 || number >= kSignals || !is_caught.at(number)) return;
  sigaction(number, &before.at(number), nullptr);
  kill(getpid(), number);
}

void release_stop_signals(bool heeded) {
  for (int number = 1; number < kSignals; ++number) {
    if (!is_caught.at(number).exchange(false)) continue;
    struct sigaction current{};
    if (sigaction(number, nullptr, &current) == 0 && (current.sa_flags & SA_SIGINFO) != 0 &&
        current.sa_sigaction == &note_stop_signal) {
      sigaction(number, &before.at(number), nullptr);
    }
  }
  if (heeded) {
    noted = 0;
    noted_at_ns = 0;
  }
  catches.store(false);
}

}  // namespace torchddp
