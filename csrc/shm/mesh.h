// How the processes of a host find each other: Unix sockets, over which each gives its segment to the others.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "shm/segment.h"

namespace torchddp::shm {

// What ranks compare to see whether they share a host: the kernel's boot id, the network namespace (sockets below it are out of
// reach of another one, and a container is a host of its own), and TORCHDDP_HOST_ID where it is set.
std::string host_identity();

// A peer of this host: its segment, and two ways to learn that it is gone.
struct Peer {
  Mapping segment;
  Fd socket;
  Fd pidfd;  // none before Linux 5.3, or when the peer is in another pid namespace
  int pid = 0;

  // Its process has exited. Asks the kernel: about a microsecond.
  bool gone() const;
};

// Waits at a socket in the abstract namespace: nothing in the file system, gone with the process.
class Listener {
 public:
  // Throws Unavailable.
  Listener();
  // A random name of 32 characters, to be told to the peers.
  const std::string& address() const { return address_; }

  // Exchanges segments with all ranks of the host; addresses[i] is the listener of rank i, `rank` is this one's own. Every rank
  // must call it at about the same time. The result has an empty entry for this rank. Throws Unavailable: a peer can't be
  // reached within `timeout`, is another user's, or speaks another version.
  // Once: the socket is closed on return, so that peers see that nobody listens any more.
  std::vector<Peer> connect(const std::vector<std::string>& addresses, int rank, const Segment& own,
                            std::chrono::milliseconds timeout);

 private:
  Fd socket_;
  std::string address_;
};

}  // namespace torchddp::shm
