// The state of the other ranks' processes on this host, because a closed connection does not say whose it was.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace torchddp::reducer {

struct PeerProcess {
  int64_t rank = 0;
  int64_t pid = 0;
  int64_t started = 0;  // kernel start time, as the pid may have been reused
};

// Peers that are gone or stopped, with rank and pid, except those that `told` already reports as dead; empty if there are none.
// A dying process closes its connections before it disappears, so this keeps looking for up to `patience`.
std::string missing_peers(const std::vector<PeerProcess>& peers, const std::string& told,
                          std::chrono::milliseconds patience);

}  // namespace torchddp::reducer
