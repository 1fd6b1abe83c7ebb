// What has become of the other ranks' processes, where this host can tell: a connection that has ended does not say whose it was.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace torchddp::reducer {

struct PeerProcess {
  int64_t rank = 0;
  int64_t pid = 0;
  int64_t started = 0;  // as the kernel counts it: the number may belong to another process by now
};

// Those that are gone or stopped, with rank and number, except those that `told` says have died; empty if none is. A process that is being
// ended closes its connections before it is gone, so this looks for as long as `patience` until it finds one.
std::string missing_peers(const std::vector<PeerProcess>& peers, const std::string& told,
                          std::chrono::milliseconds patience);

}  // namespace torchddp::reducer
