#include "model/memory.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <unordered_map>

#include "model/scheduler.h"
#include "model/total_order.h"

namespace torchddp::model {
namespace {

struct Store {
  uint64_t value = 0;
  int thread = -1;
  uint32_t time = 0;
  bool seq_cst = true;
  bool is_plain = false;  // of a new object, which other threads must not see before it is there
  Clocks released;        // what a load that acquires it joins
};

struct Location {
  uint64_t execution = 0;
  int bytes = 0;
  std::vector<Store> stores;  // in modification order
  struct Read {
    uint32_t time;
    int index;
  };
  std::array<std::vector<Read>, kMaxThreads> reads;
  std::array<uint32_t, kMaxThreads> used{};  // last, by each thread
  Clocks unlocked;                           // of a mutex
  bool is_locked = false;
  // Threads, as bits, in all executions so far.
  uint32_t readers = 0, writers = 0;
};

// Not with memcpy, which is seen as an access of the rank.
uint64_t peek(const void* at, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(static_cast<const volatile uint8_t*>(at)[i]) << 8 * i;
  return value;
}
void poke(void* at, int bytes, uint64_t value) {
  for (int i = 0; i < bytes; ++i) static_cast<volatile uint8_t*>(at)[i] = static_cast<uint8_t>(value >> 8 * i);
}

bool acquires(Order order) { return order == Order::acquire || order == Order::acq_rel || order == Order::seq_cst; }
bool releases(Order order) { return order == Order::release || order == Order::acq_rel || order == Order::seq_cst; }

class Memory {
 public:
  void reset() {
    ++execution_;
    total_order_.clear();
    learned_ = false;
  }
  bool learned() const { return learned_; }

  Location& at(const void* address, int bytes) {
    auto& location = locations_[address];
    if (location.execution != execution_) {
      location.execution = execution_;
      location.bytes = bytes;
      location.stores.clear();
      location.stores.emplace_back().value = peek(address, bytes);
      for (auto& reads : location.reads) reads.clear();
      location.used = {};
      location.unlocked = {};
      location.is_locked = false;
    }
    return location;
  }

  // Announces a step at the location. False if it must not happen.
  bool step(Location& location, bool writes) {
    const auto mine = uint32_t{1} << scheduler().current();
    auto& known = writes ? location.writers : location.readers;
    learned_ |= (known & mine) == 0;
    known |= mine;
    const auto others = (writes ? location.readers | location.writers : location.writers) & ~mine;
    if (!scheduler().step(others != 0, writes)) return false;
    location.used[scheduler().current()] = ++scheduler().clocks().at[scheduler().current()];
    return true;
  }

  // The atomics there are new.
  void renew(const std::byte* begin, size_t bytes) {
    const auto& clocks = scheduler().clocks();
    for (auto& [address, location] : locations_) {
      const auto* at = static_cast<const std::byte*>(address);
      if (location.execution != execution_ || at < begin || at >= begin + bytes) continue;
      for (int thread = 0; thread < kMaxThreads; ++thread) {
        if (!clocks.covers(thread, location.used[thread])) {
          scheduler().fail("race: thread " + std::to_string(scheduler().current()) +
                           " makes a new object where thread " + std::to_string(thread) + " uses an old one");
        }
      }
      const auto bytes_of = location.bytes;
      total_order_.forget(&location);
      location.stores.clear();
      location.stores.push_back(
          {peek(address, bytes_of), scheduler().current(), clocks.at[scheduler().current()] + 1, false, true, {}});
      for (auto& reads : location.reads) reads.clear();
      location.used = {};
    }
  }

  uint64_t load(Location& location, Order order) {
    auto& clocks = scheduler().clocks();
    const int me = scheduler().current();
    const int newest = static_cast<int>(location.stores.size()) - 1;
    const int oldest = oldest_visible(location, order);
    const int index = oldest < newest ? newest - scheduler().choose_stale(newest - oldest) : newest;
    const auto& found = location.stores[index];
    auto& reads = location.reads[me];
    if (reads.empty() || reads.back().index != index) reads.push_back({clocks.at[me], index});
    acquire(found, order);
    if (order == Order::seq_cst) total_order_.add(me, clocks, &location, index, false);
    return found.value;
  }

  void store(Location& location, void* address, int bytes, uint64_t value, Order order, bool updates) {
    const auto& clocks = scheduler().clocks();
    const int me = scheduler().current();
    Store next{value, me, clocks.at[me], order == Order::seq_cst, false, {}};
    if (releases(order)) next.released = clocks;
    if (updates) next.released.join(location.stores.back().released);  // goes on with the release sequence
    location.stores.push_back(next);
    if (order == Order::seq_cst) {
      total_order_.add(me, clocks, &location, static_cast<int>(location.stores.size()) - 1, true);
    }
    poke(address, bytes, value);
  }

  // The newest value, for a read-modify-write.
  uint64_t newest(const Location& location, Order order) {
    acquire(location.stores.back(), order);
    return location.stores.back().value;
  }

 private:
  static void acquire(const Store& found, Order order) {
    auto& clocks = scheduler().clocks();
    if (acquires(order)) clocks.join(found.released);
    if (found.is_plain && !clocks.covers(found.thread, found.time)) {
      scheduler().fail("race: thread " + std::to_string(scheduler().current()) +
                       " uses an object before it can know it");
    }
    clocks.outran |= !clocks.covers(found.thread, found.time);
  }

  int oldest_visible(const Location& location, Order order) {
    const auto& clocks = scheduler().clocks();
    const bool is_ordered = order == Order::seq_cst;
    int oldest = static_cast<int>(location.stores.size()) - 1;
    const auto hides = [&](const Store& store) {
      return clocks.covers(store.thread, store.time) || (is_ordered && store.seq_cst && !clocks.outran);
    };
    while (oldest > 0 && !hides(location.stores[oldest])) --oldest;
    for (int thread = 0; thread < kMaxThreads; ++thread) {
      const auto& reads = location.reads[thread];
      const auto seen = std::find_if(reads.rbegin(), reads.rend(),
                                     [&](const Location::Read& read) { return clocks.covers(thread, read.time); });
      if (seen != reads.rend()) oldest = std::max(oldest, seen->index);
    }
    const int newest = static_cast<int>(location.stores.size()) - 1;
    for (int next = newest - 1; is_ordered && clocks.outran && next >= oldest; --next) {
      auto after = clocks;
      after.join(location.stores[next].released);
      if (!total_order_.allows(after, &location, next)) oldest = next + 1;
    }
    return oldest;
  }

  std::unordered_map<const void*, Location> locations_;
  TotalOrder total_order_;
  uint64_t execution_ = 1;
  bool learned_ = false;
};

Memory memory;

// --- what a replay prints ---------------------------------------------------------------------------------------------

bool tells = false;

void tell(const char* what) {
  if (tells) std::printf("thread %d %s\n", scheduler().current(), what);
}
void tell(const Where& where, Order order, uint64_t value) {
  if (!tells) return;
  const Site site{where.file_name(), where.line(), where.column(), Access::kLoad, order};
  std::printf("thread %d %s, %s: %llx\n", scheduler().current(), site.name().c_str(), to_string(order),
              static_cast<unsigned long long>(value));
}

// --- races ------------------------------------------------------------------------------------------------------------

struct Cell {
  uint64_t execution = 0;
  int writer = -1;
  uint32_t written = 0;
  std::array<uint32_t, kMaxThreads> read{};
};
constexpr size_t kCellBytes = 8;

alignas(4096) std::array<std::byte, kArenaBytes> memory_of_ranks;
std::array<Cell, kArenaBytes / kCellBytes> cells;
uint64_t cell_execution = 1;

void access(const void* address, size_t bytes, bool writes) {
  const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(memory_of_ranks.data());
  if (offset >= kArenaBytes || bytes == 0 || !scheduler().is_running() || scheduler().is_over()) return;
  const int me = scheduler().current();
  const auto& clocks = scheduler().clocks();
  const auto now = clocks.at[me] + 1;  // of the next step: what is released before does not cover it
  for (size_t i = offset / kCellBytes; i <= (offset + bytes - 1) / kCellBytes; ++i) {
    auto& cell = cells[i];
    if (cell.execution != cell_execution) cell = {.execution = cell_execution};
    int other = cell.writer >= 0 && cell.writer != me && !clocks.covers(cell.writer, cell.written) ? cell.writer : -1;
    for (int reader = 0; writes && reader < kMaxThreads; ++reader) {
      if (reader != me && !clocks.covers(reader, cell.read[reader])) other = reader;
    }
    if (other >= 0) {
      scheduler().fail("race: thread " + std::to_string(me) + (writes ? " writes" : " reads") + " byte " +
                       std::to_string(i * kCellBytes) + " of the arena, which thread " + std::to_string(other) +
                       " uses");
      return;
    }
    if (writes) {
      cell.writer = me;
      cell.written = now;
    } else {
      cell.read[me] = now;
    }
  }
}

}  // namespace

uint64_t load(const void* at, int bytes, Order order, const Where& where) {
  if (!scheduler().is_running()) return peek(at, bytes);
  order = order_of(where, Access::kLoad, order);
  auto& location = memory.at(at, bytes);
  if (!memory.step(location, false)) return location.stores.back().value;
  const auto value = memory.load(location, order);
  tell(where, order, value);
  return value;
}

void store(void* at, int bytes, uint64_t value, Order order, const Where& where) {
  if (!scheduler().is_running()) return poke(at, bytes, value);
  order = order_of(where, Access::kStore, order);
  auto& location = memory.at(at, bytes);
  if (!memory.step(location, true)) return;
  tell(where, order, value);
  memory.store(location, at, bytes, value, order, false);
}

void store_now(void* at, int bytes, uint64_t value) {
  ++scheduler().clocks().at[scheduler().current()];
  memory.store(memory.at(at, bytes), at, bytes, value, Order::seq_cst, false);
}

uint64_t update(void* at, int bytes, uint64_t (*change)(uint64_t, uint64_t), uint64_t operand, Order order,
                const Where& where) {
  if (!scheduler().is_running()) {
    const auto value = peek(at, bytes);
    poke(at, bytes, change(value, operand));
    return value;
  }
  order = order_of(where, Access::kUpdate, order);
  auto& location = memory.at(at, bytes);
  if (!memory.step(location, true)) return location.stores.back().value;
  const auto value = memory.newest(location, order);
  tell(where, order, value);
  memory.store(location, at, bytes, change(value, operand), order, true);
  return value;
}

bool compare_exchange(void* at, int bytes, uint64_t& expected, uint64_t desired, Order order, const Where& where) {
  if (!scheduler().is_running()) {
    const auto value = peek(at, bytes);
    const bool swaps = value == expected;
    if (swaps) poke(at, bytes, desired);
    expected = value;
    return swaps;
  }
  order = order_of(where, Access::kUpdate, order);
  auto& location = memory.at(at, bytes);
  if (!memory.step(location, true)) return true;
  const auto found = memory.newest(location, order);
  tell(where, order, found);
  if (found != expected) {
    expected = found;
    return false;
  }
  memory.store(location, at, bytes, desired, order, true);
  return true;
}

void lock(void* mutex) {
  while (!try_lock(mutex)) scheduler().wait_for(mutex);
}

bool try_lock(void* mutex) {
  if (!scheduler().is_running()) return true;
  auto& location = memory.at(mutex, 1);
  if (!memory.step(location, true)) return true;
  if (location.is_locked) return false;
  location.is_locked = true;
  scheduler().clocks().join(location.unlocked);
  return true;
}

// Not a step: that another thread could come between is a choice of the next one.
void unlock(void* mutex) {
  if (!scheduler().is_running() || scheduler().is_over()) return;
  auto& location = memory.at(mutex, 1);
  ++scheduler().clocks().at[scheduler().current()];
  location.unlocked = scheduler().clocks();
  location.is_locked = false;
  scheduler().release(mutex);
}

void sleep_on(void* word, uint32_t expected, int64_t longest_ns) {
  auto& location = memory.at(word, sizeof(uint32_t));
  if (!memory.step(location, false)) return;
  const bool sleeps = location.stores.back().value == expected;
  tell(sleeps ? "sleeps" : "does not sleep");
  if (sleeps) scheduler().sleep(word, longest_ns);
}

void wake_all(void* word) {
  if (!scheduler().is_running()) return;
  if (!memory.step(memory.at(word, sizeof(uint32_t)), true)) return;
  tell("wakes all");
  scheduler().wake(word);
}

std::byte* arena() { return memory_of_ranks.data(); }
void read(const void* from, size_t bytes) { access(from, bytes, false); }
void write(const void* to, size_t bytes) { access(to, bytes, true); }

void tell_steps(bool whether) { tells = whether; }

void renew(const void* at, size_t bytes) {
  write(at, bytes);
  memory.renew(static_cast<const std::byte*>(at), bytes);
}

void reset_memory() {
  memory.reset();
  ++cell_execution;
  std::ranges::fill(memory_of_ranks, std::byte{0});
}
bool learned() { return memory.learned(); }

}  // namespace torchddp::model
