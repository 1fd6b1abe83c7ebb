#include "model/total_order.h"

namespace torchddp::model {

// Not if an operation that must come after the load must also come before it.
bool TotalOrder::allows(const Clocks& clocks, const void* place, int index) {
  reached_.clear();
  is_reached_.assign(events_.size(), 0);
  const auto reach = [&](size_t event) {
    if (is_reached_[event] == 0) reached_.push_back(event);
    is_reached_[event] = 1;
  };
  for (size_t i = 0; i < events_.size(); ++i) {
    if (events_[i].place == place && events_[i].index > index) reach(i);
  }
  for (size_t next = 0; next < reached_.size(); ++next) {
    const auto& event = events_[reached_[next]];
    if (event.precedes(clocks) || event.precedes_value(place, index, false)) return false;
    for (size_t i = 0; i < events_.size(); ++i) {
      if (is_reached_[i] == 0 && event.precedes(events_[i])) reach(i);
    }
  }
  return true;
}

}  // namespace torchddp::model
