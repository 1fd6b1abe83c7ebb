// A forked child has copies of its parent's objects, but none of the threads, peers and locks that belong to them.
#pragma once

namespace torchddp {

// How often this process was forked from another one, counted in the child, from the first call on. An object that keeps the number it was
// made at knows whether it is still where it was made, for the price of a load.
int forks();

}  // namespace torchddp
