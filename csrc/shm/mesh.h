// How the processes of a host find each other: over Unix sockets, on which each sends its segment to the others.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "shm/segment.h"

namespace torchddp::shm {

// What ranks compare to find out whether they share a host: the kernel's boot id, the network namespace (its sockets are
// unreachable from another one, so a container counts as a host), and TORCHDDP_HOST_ID if set.
std::string host_identity();

// A peer on this host: its segment, and two ways to notice that it is gone.
struct Peer {
  Mapping segment;
  Fd socket;
  Fd pidfd;  // absent before Linux 5.3, or if the peer is in another pid namespace
  int pid = 0;

  // Whether its process has exited. Asks the kernel, which takes about a microsecond.
  bool gone() const;
};

// Listens on a socket in the abstract namespace: nothing in the file system, gone with the process.
class Listener {
 public:
  // Throws Unavailable.
  Listener();
  // A random name of 32 characters, to be sent to the peers.
  const std::string& address() const { return address_; }

  // Exchanges segments with all ranks of the host. addresses[i] is the listener of rank i; `rank` is this rank. Every rank must
  // call it at about the same time. The entry for this rank is empty in the result. Throws Unavailable if a peer can't be
  // reached within `timeout`, belongs to another user, or speaks another version. Can be called once: the socket is closed on
  // return, so that peers see that no one listens any more.
  std::vector<Peer> connect(const std::vector<std::string>& addresses, int rank, const Segment& own,
                            std::chrono::milliseconds timeout);

 private:
  Fd socket_;
  std::string address_;
};

}  // namespace torchddp::shm
