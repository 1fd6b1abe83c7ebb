// The atomic operations in the source, whose orders can be weakened.
#pragma once

#include <atomic>
#include <source_location>
#include <string>
#include <vector>

namespace torchddp::model {

using Order = std::memory_order;
using Where = std::source_location;

enum class Access : char { kLoad, kStore, kUpdate };

struct Site {
  const char* file;
  unsigned line, column;
  Access access;
  Order order;

  // Its file and code, such as "board.cpp: bell.fetch_add(1)".
  std::string name() const;
  // The orders below its own, the weakest first.
  std::vector<Order> weaker() const;
};

// The order of an operation that is about to happen: `order`, unless it is weakened.
Order order_of(const Where& where, Access access, Order order);
// All that have happened so far outside of the model, in the order of the source.
std::vector<Site> sites();
// From now on this one has another order; null: none has.
void weaken(const Site* site, Order order = Order::relaxed);

const char* to_string(Order order);

}  // namespace torchddp::model
