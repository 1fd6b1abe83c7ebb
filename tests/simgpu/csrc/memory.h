// The device's memory, and who used it last.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "clock.h"

namespace torchddp::sim {

struct Range {
  const void* data = nullptr;
  int64_t bytes = 0;
  bool writes = false;
};

// Thread-compatible: the Machine has the lock.
class Memory {
 public:
  // Called with two accesses that nothing orders.
  using Report = std::function<void(const std::string& earlier, const std::string& later)>;

  explicit Memory(Report report) : report_(std::move(report)) {}
  Memory& operator=(Memory&&) = delete;

  // Stream-ordered, as torch's caching allocator: a freed block is given out again at once to whoever allocates on the stream
  // that it came from, and holds what it held.
  void* allocate(int64_t bytes, Actor stream);
  // A block of its own that is never given back: a captured graph holds its address.
  void* allocate_for_ever(int64_t bytes);
  // The block may be given out again only once the device is idle (Tensor.record_stream).
  void defer(const void* data);
  void release(void* data);
  void device_is_idle();
  // All that follows is ordered after what came before. Gives back what is free.
  void forget_accesses();
  int64_t size_of(const void* data) const;
  // Notes the access; reports every earlier one that conflicts with it and isn't known to `clock`.
  void use(const Range& range, const Clock& clock, Moment at, const std::string& what);

 private:
  struct Access {
    Moment at;
    std::string what;
  };
  struct Piece {  // [its key, end)
    uintptr_t end = 0;
    Access write;
    std::vector<Access> reads;
  };
  struct Block {
    int64_t bytes = 0;
    Actor stream = 0;
    bool live = true;
    bool deferred = false;
    bool for_ever = false;
    std::map<uintptr_t, Piece> pieces;
    void forget_accesses(uintptr_t begin) { pieces = {{begin, {begin + static_cast<uintptr_t>(bytes), {}, {}}}}; }
  };
  using Blocks = std::map<uintptr_t, Block>;

  void* make(int64_t rounded, Actor stream);
  Blocks::iterator find(const void* data);
  Blocks::const_iterator find(const void* data) const { return const_cast<Memory*>(this)->find(data); }
  static void split(Block& block, uintptr_t at);

  const Report report_;
  Blocks blocks_;
  std::map<std::pair<Actor, int64_t>, std::vector<uintptr_t>> free_;
  std::vector<uintptr_t> deferred_;
};

}  // namespace torchddp::sim
