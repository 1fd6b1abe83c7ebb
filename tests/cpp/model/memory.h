// Memory under the C++ memory model.
//
// Note [Memory]
// The stores to an atomic are kept, in the order in which they happen (their modification order). A load may give any of them
// that is not ruled out: by a later one that happened before the load, or that the thread, or one that happened before, has
// read; and for a sequentially consistent load, by the order of all such operations (total_order.h). What happened before what is kept in vector
// clocks: an acquiring load joins the clock of the release that it reads from, through any read-modify-writes in between. So
// the model has no loads that read from the future, and modification orders are those of execution. Read-modify-writes read the
// newest value, a compare-exchange that fails too, and none fails spuriously.
//
// Ordinary memory, below kArena, is checked for races: two accesses of which none happened before the other, and one writes.
// Without races, ordinary memory holds what the last write left, so that it is just that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "model/sites.h"

namespace torchddp::model {

uint64_t load(const void* at, int bytes, Order order, const Where& where);
void store(void* at, int bytes, uint64_t value, Order order, const Where& where);
uint64_t update(void* at, int bytes, uint64_t (*change)(uint64_t, uint64_t), uint64_t operand, Order order,
                const Where& where);
bool compare_exchange(void* at, int bytes, uint64_t& expected, uint64_t desired, Order order, const Where& where);

// The same without a choice before it: what the kernel does.
void store_now(void* at, int bytes, uint64_t value);

void lock(void* mutex);
bool try_lock(void* mutex);
void unlock(void* mutex);

// As the futex of Linux: it compares under a lock that wakers take too, so it sees the newest value.
void sleep_on(void* word, uint32_t expected, int64_t longest_ns);
void wake_all(void* word);

// The memory that ranks share, and what they give to operations: zeros at the beginning of an execution.
inline constexpr size_t kArenaBytes = 44 * 1024;
std::byte* arena();
// Accesses to ordinary memory; of no consequence outside of the arena.
void read(const void* from, size_t bytes);
void write(const void* to, size_t bytes);

// The running thread makes new objects of the ordinary memory and the atomics there, whose bytes it has set. No one may use what
// was there, or what is there before it can know of it.
void renew(const void* at, size_t bytes);

// The bytes of a new atomic.
template <class Atomic, class T>
void initialize(Atomic& atomic, T value) {
  static_assert(sizeof(Atomic) == sizeof(T));
  std::memcpy(static_cast<void*>(&atomic), &value, sizeof(T));
}

// Whether to print every step, with the value that it stores or finds.
void tell_steps(bool whether);

// A new execution.
void reset_memory();
// Whether the last execution touched something in a new way, so that its steps are seen by more threads than was known. A
// search that skips steps that no one sees must then begin again.
bool learned();

}  // namespace torchddp::model
