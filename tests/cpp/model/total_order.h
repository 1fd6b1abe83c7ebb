// The single total order of sequentially consistent operations, as far as it is decided.
//
// Such operations happen one after another in an execution, and that is one order they may have. But a load may also come earlier
// in that order than where it happened, before a store that it does not see: if its thread has before read, without acquiring
// it, what was stored meanwhile, then no execution has the load earlier. So it is allowed to give an older value if an order
// remains that agrees with what happened before what, and with the order of values at each place.
#pragma once

#include <cstdint>
#include <vector>

#include "model/clocks.h"

namespace torchddp::model {

class TotalOrder {
 public:
  void clear() { events_.clear(); }
  // There is a new object at this place.
  void forget(const void* place) {
    std::erase_if(events_, [&](const Event& event) { return event.place == place; });
  }
  // The running thread stored value number `index` of the place, or loaded it.
  void add(int thread, const Clocks& clocks, const void* place, int index, bool stores) {
    events_.push_back({thread, clocks, place, index, stores});
  }
  // Whether a load, after which a thread has these clocks, may give value number `index`.
  bool allows(const Clocks& clocks, const void* place, int index);

 private:
  struct Event {
    int thread;
    Clocks clocks;  // when it happened
    const void* place;
    int index;
    bool stores;

    bool precedes(const Clocks& later) const { return later.covers(thread, clocks.at[thread]); }
    // By the values at their place, of which the other loads or stores this one.
    bool precedes_value(const void* other_place, int other, bool other_stores) const {
      return place == other_place && (index < other || (index == other && stores && !other_stores));
    }
    bool precedes(const Event& other) const {
      return (&other != this && precedes(other.clocks)) || precedes_value(other.place, other.index, other.stores);
    }
  };

  std::vector<Event> events_;
  std::vector<size_t> reached_;
  std::vector<char> is_reached_;
};

}  // namespace torchddp::model
