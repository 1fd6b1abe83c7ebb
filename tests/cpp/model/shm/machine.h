// In place of csrc/shm/machine.h: the same names, but every access is a step of a search (model/memory.h), under the C++ memory
// model and a clock that moves only when it must.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <source_location>

#include "model/memory.h"
#include "model/scheduler.h"

namespace torchddp::shm {

using Order = std::memory_order;
using Where = std::source_location;

// Its size and representation are those of T, so that memory filled with zeros holds atomics, as in a new segment.
template <class T>
class Atomic {
 public:
  Atomic() = default;
  Atomic(T value) : value_(value) {}
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;

  T load(Order order = Order::seq_cst, Where at = Where::current()) const {
    return of_bits(model::load(&value_, sizeof(T), order, at));
  }
  void store(T value, Order order = Order::seq_cst, Where at = Where::current()) {
    model::store(&value_, sizeof(T), bits(value), order, at);
  }
  T fetch_add(T operand, Order order = Order::seq_cst, Where at = Where::current()) {
    return update([](T old, T more) { return static_cast<T>(old + more); }, operand, order, at);
  }
  T fetch_sub(T operand, Order order = Order::seq_cst, Where at = Where::current()) {
    return update([](T old, T less) { return static_cast<T>(old - less); }, operand, order, at);
  }
  T fetch_or(T operand, Order order = Order::seq_cst, Where at = Where::current()) {
    return update([](T old, T more) { return static_cast<T>(old | more); }, operand, order, at);
  }
  bool compare_exchange_strong(T& expected, T desired, Order order = Order::seq_cst, Where at = Where::current()) {
    auto found = bits(expected);
    const bool swapped = model::compare_exchange(&value_, sizeof(T), found, bits(desired), order, at);
    expected = of_bits(found);
    return swapped;
  }
  bool compare_exchange_weak(T& expected, T desired, Order order = Order::seq_cst, Where at = Where::current()) {
    return compare_exchange_strong(expected, desired, order, at);
  }

 private:
  static uint64_t bits(T value) {
    uint64_t result = 0;
    std::memcpy(&result, &value, sizeof(T));
    return result;
  }
  static T of_bits(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }
  template <class Change>
  T update(Change, T operand, Order order, Where at) {
    const auto change = [](uint64_t old, uint64_t other) { return bits(Change{}(of_bits(old), of_bits(other))); };
    return of_bits(model::update(&value_, sizeof(T), change, bits(operand), order, at));
  }

  T value_{};
};

class Mutex {
 public:
  void lock() { model::lock(this); }
  bool try_lock() { return model::try_lock(this); }
  void unlock() { model::unlock(this); }

 private:
  char unused_ = 0;  // it is known by its address
};

struct Clock : std::chrono::steady_clock {
  static time_point now() { return time_point(std::chrono::nanoseconds(model::scheduler().now())); }
};

inline void sleep_on(Atomic<uint32_t>& word, uint32_t expected, int64_t longest_ns) {
  model::sleep_on(&word, expected, longest_ns);
}
inline void wake_all(Atomic<uint32_t>& word) { model::wake_all(&word); }
inline void unmap_pages(const std::byte* /*begin*/, int64_t /*bytes*/) {}

inline void yield_cpu() { model::scheduler().yield(); }
inline void pause_cpu() { model::scheduler().yield(); }

}  // namespace torchddp::shm
