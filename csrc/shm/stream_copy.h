// Copies to memory that other processes read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace torchddp::shm {

// As memcpy, past the caches. A store to a line that a peer has read waits until that peer's cache has let go of it, one line after
// the other: for a buffer in use again and again that takes ten times as long as the copy. The reader finds it in memory as soon as in
// this processor's cache. Whoever sees what is stored after the call sees the copy.
inline void stream_copy(void* to, const void* from, int64_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
#if defined(__x86_64__)
  constexpr int64_t kLine = 64;
  const auto lead = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) % kLine);
  if (bytes >= lead + kLine) {
    std::memcpy(target, source, static_cast<size_t>(lead));
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
  if (bytes > 0) {
    std::memcpy(target, source, static_cast<size_t>(bytes));
  }
}

}  // namespace torchddp::shm
