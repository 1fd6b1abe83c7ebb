// What the protocol takes from the machine. tests/cpp/model has another header of this name, with which the same sources are
// searched for executions that go wrong (docs/shm_model.md): what other ranks or threads can see goes through here.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <mutex>

namespace torchddp::shm {

template <class T>
using Atomic = std::atomic<T>;
using Mutex = std::mutex;
using Clock = std::chrono::steady_clock;

// Sleeps until a wake_all(), if the word still is `expected`, or the time is up.
inline void sleep_on(Atomic<uint32_t>& word, uint32_t expected, int64_t longest_ns) {
  const timespec timeout{longest_ns / 1'000'000'000, longest_ns % 1'000'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}
inline void wake_all(Atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

inline void yield_cpu() { sched_yield(); }
inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Takes pages of a segment out of this process's resident set (VmRSS, VmHWM). They keep their contents, and are mapped again when
// touched: a fault for 64 KiB, or for a huge page.
inline void unmap_pages(std::byte* begin, int64_t bytes) {
  constexpr uintptr_t kPage = 4096;
  const auto ahead = reinterpret_cast<uintptr_t>(begin) % kPage;
  madvise(begin - ahead, bytes + ahead, MADV_DONTNEED);
}

}  // namespace torchddp::shm
