// A forked child has copies of its parent's objects, but not the threads, peers and locks behind them.
#pragma once

namespace torchddp {

// How many forks led to this process, counted in the child from the first call on. An object that stores the count of its
// creation can tell, for the price of a load, whether it is still in the process that made it.
int forks();

}  // namespace torchddp
