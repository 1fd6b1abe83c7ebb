// Signals that ask a process to stop, noted without Python: also while its main thread is in C++ or another thread holds the
// interpreter's lock.
#pragma once

#include <vector>

namespace torchddp {

// Until release: the first of these signals is only noted. Later ones, from any of them, do what they did before, so a second
// one ends a process that does not stop by itself; but launchers and schedulers may both pass one on, so repetitions within
// kSameRequest are ignored. Forked children inherit this, because launchers signal whole process groups, but a signal from the
// parent does what it did before: it ends them. `for_parent`: called in such a child, where somebody has installed handlers
// since. Throws std::invalid_argument for a number that is no signal, and std::logic_error if the process catches some
// already. These are called by one thread at a time.
void catch_stop_signals(const std::vector<int>& numbers, bool for_parent = false);

// The noted signal; 0 if there was none.
int noted_stop_signal();

// What the signal would have done. Returns if that is nothing, or a handler that lets the process live.
void pass_on_stop_signal(int number);

// Restores what was done before, except where somebody else has installed a handler since. A noted signal that was not heeded
// stays noted.
void release_stop_signals(bool heeded);

}  // namespace torchddp
