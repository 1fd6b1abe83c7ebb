#include "transport/c10d/failure_guard.h"

#include <unistd.h>

#include <thread>
#include <utility>

namespace torchddp::transport {
namespace {

constexpr std::chrono::seconds kEvery{1};
constexpr std::chrono::seconds kLongestEnd{2};
// As in torchddp/diagnose/fail_together.py: a save that holds the interpreter for longer has died.
constexpr std::chrono::seconds kLongestSave{600};

}  // namespace

FailureGuard::FailureGuard(c10::intrusive_ptr<c10d::Store> store, Keys keys, std::chrono::milliseconds patience,
                           std::string last_words)
    : watch_(std::make_shared<Watch>(std::move(store), std::move(keys), patience, std::move(last_words))) {
  std::thread([watch = watch_] { watch->run(); }).detach();
}

FailureGuard::~FailureGuard() {
  if (made_in_ != forks()) return;  // a forked child does not have the thread
  std::unique_lock lock(watch_->mutex);
  watch_->ends = true;
  watch_->changed.notify_all();
  watch_->changed.wait_for(lock, kLongestEnd, [this] { return watch_->ended; });
}

void FailureGuard::Watch::run() {
  std::unique_lock lock(mutex);
  while (!changed.wait_for(lock, kEvery, [this] { return ends; })) {
    lock.unlock();
    look();
    lock.lock();
  }
  store.reset();
  ended = true;
  changed.notify_all();
}

void FailureGuard::Watch::look() {
  const auto silent = Clock::now() - signed_at.load(std::memory_order_relaxed);
  const bool saves = saving.load(std::memory_order_relaxed) && silent < kLongestSave;
  if (silent < patience || saves) return;
  try {
    if (!store->check({keys.failure}) || store->add(keys.saving, 0) > 0) return;
  } catch (const std::exception&) {
    return;  // the store is gone: launchers end what is left
  }
  const std::lock_guard lock(mutex);
  if (ends) return;
  static_cast<void>(!write(STDERR_FILENO, last_words.data(), last_words.size()));
  _exit(1);
}

}  // namespace torchddp::transport
