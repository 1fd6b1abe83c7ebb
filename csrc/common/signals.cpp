#include "common/signals.h"

#include <atomic>

namespace torchddp {
namespace {
std::atomic<SignalCheck> signal_check{nullptr};
}  // namespace

void set_signal_check(SignalCheck check) { signal_check.store(check); }

void check_signals() {
  if (const auto check = signal_check.load()) {
    check();
  }
}

}  // namespace torchddp
