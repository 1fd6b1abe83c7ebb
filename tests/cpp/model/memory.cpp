#include "model/memory.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <tuple>
#include <unordered_map>

#include "model/scheduler.h"

namespace torchddp::model {
namespace {

struct Store {
  uint64_t value = 0;
  int thread = -1;
  uint32_t time = 0;
  bool seq_cst = true;
  Clocks released;  // what a load that acquires it joins
};

struct Location {
  uint64_t execution = 0;
  std::vector<Store> stores;  // in modification order
  struct Read {
    uint32_t time;
    int index;
  };
  std::array<std::vector<Read>, kMaxThreads> reads;
  Clocks unlocked;  // of a mutex
  bool is_locked = false;
  // Threads, as bits, in all executions since the last change of scenario.
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
    learned_ = false;
  }
  bool learned() const { return learned_; }

  Location& at(const void* address, int bytes) {
    auto& location = locations_[address];
    if (location.execution != execution_) {
      location.execution = execution_;
      location.stores.clear();
      location.stores.emplace_back().value = peek(address, bytes);
      for (auto& reads : location.reads) reads.clear();
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
    ++scheduler().clocks().at[scheduler().current()];
    return true;
  }

  uint64_t load(Location& location, Order order) {
    auto& clocks = scheduler().clocks();
    const int me = scheduler().current();
    const int newest = static_cast<int>(location.stores.size()) - 1;
    const int oldest = oldest_visible(location, order);
    const int index = oldest < newest ? newest - scheduler().choose_stale(newest - oldest) : newest;
    auto& reads = location.reads[me];
    if (reads.empty() || reads.back().index != index) reads.push_back({clocks.at[me], index});
    if (acquires(order)) clocks.join(location.stores[index].released);
    return location.stores[index].value;
  }

  void store(Location& location, void* address, int bytes, uint64_t value, Order order, bool updates) {
    const auto& clocks = scheduler().clocks();
    const int me = scheduler().current();
    Store next{value, me, clocks.at[me], order == Order::seq_cst, {}};
    if (releases(order)) next.released = clocks;
    if (updates) next.released.join(location.stores.back().released);  // goes on with the release sequence
    location.stores.push_back(next);
    poke(address, bytes, value);
  }

  // The newest value, for a read-modify-write.
  uint64_t newest(const Location& location, Order order) {
    if (acquires(order)) scheduler().clocks().join(location.stores.back().released);
    return location.stores.back().value;
  }

 private:
  static int oldest_visible(const Location& location, Order order) {
    const auto& clocks = scheduler().clocks();
    int oldest = static_cast<int>(location.stores.size()) - 1;
    const auto hides = [&](const Store& store) {
      return clocks.covers(store.thread, store.time) || (order == Order::seq_cst && store.seq_cst);
    };
    while (oldest > 0 && !hides(location.stores[oldest])) --oldest;
    for (int thread = 0; thread < kMaxThreads; ++thread) {
      const auto& reads = location.reads[thread];
      const auto seen = std::find_if(reads.rbegin(), reads.rend(),
                                     [&](const Location::Read& read) { return clocks.covers(thread, read.time); });
      if (seen != reads.rend()) oldest = std::max(oldest, seen->index);
    }
    return oldest;
  }

  std::unordered_map<const void*, Location> locations_;
  uint64_t execution_ = 1;
  bool learned_ = false;
};

Memory memory;

// --- orders in the source ---------------------------------------------------------------------------------------------

class Sites {
 public:
  Order order_of(const Where& where, char kind, Order order) {
    auto& site = find(where, kind, order);
    return &site == weakened_ ? weaker_ : order;
  }
  std::vector<Site> all() const {
    std::vector<Site> result(sites_.begin(), sites_.end());
    std::ranges::sort(result, {},
                      [](const Site& site) { return std::tuple(std::string(site.file), site.line, site.column); });
    return result;
  }
  void weaken(const Site* site, Order order) {
    weakened_ = nullptr;
    weaker_ = order;
    for (const auto& known : sites_) {
      if (site != nullptr && is_same(known, *site)) weakened_ = &known;
    }
  }

 private:
  static bool is_same(const Site& a, const Site& b) {
    return a.line == b.line && a.column == b.column && std::strcmp(a.file, b.file) == 0;
  }
  // A header's place has a file name in each source that includes it.
  const Site& find(const Where& where, char kind, Order order) {
    auto& site = by_place_[{where.file_name(), where.line() << 10 | where.column()}];
    if (site == nullptr) {
      const Site added{where.file_name(), where.line(), where.column(), where.function_name(), kind, order};
      const auto known = std::ranges::find_if(sites_, [&](const Site& other) { return is_same(other, added); });
      site = known != sites_.end() ? &*known : &sites_.emplace_back(added);
    }
    return *site;
  }

  struct Hash {
    size_t operator()(const std::pair<const char*, unsigned>& place) const {
      return std::hash<const char*>()(place.first) ^ place.second * size_t{0x9E3779B97F4A7C15};
    }
  };
  std::deque<Site> sites_;
  std::unordered_map<std::pair<const char*, unsigned>, const Site*, Hash> by_place_;
  const Site* weakened_ = nullptr;
  Order weaker_ = Order::relaxed;
};

Sites all_sites;

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
  order = all_sites.order_of(where, 'l', order);
  auto& location = memory.at(at, bytes);
  return memory.step(location, false) ? memory.load(location, order) : location.stores.back().value;
}

void store(void* at, int bytes, uint64_t value, Order order, const Where& where) {
  if (!scheduler().is_running()) return poke(at, bytes, value);
  order = all_sites.order_of(where, 's', order);
  auto& location = memory.at(at, bytes);
  if (memory.step(location, true)) memory.store(location, at, bytes, value, order, false);
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
  order = all_sites.order_of(where, 'u', order);
  auto& location = memory.at(at, bytes);
  if (!memory.step(location, true)) return location.stores.back().value;
  const auto value = memory.newest(location, order);
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
  order = all_sites.order_of(where, 'u', order);
  auto& location = memory.at(at, bytes);
  if (!memory.step(location, true)) return true;
  const auto found = memory.newest(location, order);
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
  if (memory.step(location, false) && location.stores.back().value == expected) scheduler().sleep(word, longest_ns);
}

void wake_all(void* word) {
  if (!scheduler().is_running()) return;
  if (memory.step(memory.at(word, sizeof(uint32_t)), true)) scheduler().wake(word);
}

std::byte* arena() { return memory_of_ranks.data(); }
void read(const void* from, size_t bytes) { access(from, bytes, false); }
void write(const void* to, size_t bytes) { access(to, bytes, true); }

void reset_memory() {
  memory.reset();
  ++cell_execution;
  std::ranges::fill(memory_of_ranks, std::byte{0});
}
bool learned() { return memory.learned(); }

std::vector<Site> sites() { return all_sites.all(); }
void weaken(const Site* site, Order order) { all_sites.weaken(site, order); }

std::string to_string(const Site& site) {
  const std::string path = site.file;
  return path.substr(path.rfind('/') + 1) + ":" + std::to_string(site.line);
}

const char* to_string(Order order) {
  constexpr const char* kNames[] = {"relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst"};
  return kNames[static_cast<int>(order)];
}

}  // namespace torchddp::model
