#include "shm/copier.h"

#include <bit>
#include <chrono>
#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace torchddp::shm {
// Below this size, reading the clock takes as long as the copy.
constexpr int64_t kMinMeasured = 4096;
// The two ways. A reader is also faster if the copy is in a cache, which is not measured here.
constexpr int kStream = 1;
constexpr double kReader = 1.25;

void stream_copy(void* to, const void* from, int64_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
#if defined(__x86_64__)
  constexpr int64_t kLine = 64;
  const auto lead = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) % kLine);
  if (bytes >= lead + kLine) {
    std::memcpy(target, source, lead);
    auto at = lead;
    for (; at + kLine <= bytes; at += kLine) {
      for (int64_t part = at; part < at + kLine; part += static_cast<int64_t>(sizeof(__m128i))) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + part),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + part)));
      }
    }
    _mm_sfence();
    target += at;
    source += at;
    bytes -= at;
  }
#endif
  if (bytes > 0) std::memcpy(target, source, bytes);
}

void Copier::copy(void* to, const void* from, int64_t bytes) {
  if (bytes < kMinMeasured) {
    stream_copy(to, from, bytes);
    return;
  }
  using Clock = std::chrono::steady_clock;
  const auto size = std::min<int>(std::bit_width(static_cast<uint64_t>(bytes) / 1024), kSizes) - 1;
  auto& quicker = quicker_[size];
  const auto choice = [&] {
    const std::lock_guard lock(mutex_);
    return quicker.choice();
  }();
  const auto start = Clock::now();
  if (choice == kStream) {
    stream_copy(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
  const std::chrono::duration<double> took = Clock::now() - start;
  const std::lock_guard lock(mutex_);
  quicker.took(choice, took.count() / static_cast<double>(bytes) * (choice == kStream ? kReader : 1));
}

}  // namespace torchddp::shm
