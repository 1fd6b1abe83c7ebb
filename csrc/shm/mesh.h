// How the processes of a host find each other, over Unix sockets on which each sends its segment to the others; and what their
// engines then share.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shm/board.h"
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

// Where a rank has its part of a channel.
struct ChannelEnd {
  int number = 0;      // among the channels that the rank has opened
  int64_t header = 0;  // offset in its segment
};

// Note [Channels]
// The engines of a process that talk to the same peers use the same segments, sockets and process handles: a model may have a
// wrapper for each layer, and descriptors and address space are limited. Each engine has a channel: one header in each segment,
// with slots, doorbell and states of its own. So engines neither wait for each other nor fail together. (Between hosts there is
// one engine for a process group: see ShmMeeting.)
//
// A channel's header, and memory that its peers may still read or write, can't be used for anything else, or lose its pages,
// before all ranks have closed the channel. Each rank says so in the first header of its segment, which lasts as long as the
// segment, and looks for it when it opens the next channel.

// The segments of a host's ranks, connected. Thread-safe. A forked child has nothing of it.
class Mesh {
 public:
  // `name`: the same on all ranks, and unique. `peers` as returned by Listener::connect.
  Mesh(std::string name, int rank, std::shared_ptr<Segment> own, std::vector<Peer> peers);
  ~Mesh();

  const std::string& name() const { return name_; }
  const std::shared_ptr<Segment>& segment() const { return own_; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  bool is_inherited() const;
  bool gone(int rank) const { return peers_[rank].gone(); }

  // Makes this rank's end of a channel, which is to be told to the peers. Null if there is no room, or too many were opened.
  std::optional<ChannelEnd> open();
  // `ends`: of all ranks. Throws Unavailable if a peer's is not in its segment.
  std::vector<SegmentView> view(const std::vector<ChannelEnd>& ends) const;
  // No peer has been told of this end.
  void drop(const ChannelEnd& end);
  // This rank's engine is gone. `kept`: memory that the others may still read or write. `forever`: others than these ranks may,
  // too.
  void close(std::vector<ChannelEnd> ends, std::shared_ptr<void> kept, bool forever);

 private:
  struct Closed {
    std::vector<ChannelEnd> ends;
    std::shared_ptr<void> kept;
    bool forever;
  };
  const Header& first_header(size_t rank) const;
  bool is_needed(const Closed& closed) const;
  void release(const ChannelEnd& end);

  const std::string name_;
  const int rank_;
  const int forks_;
  const std::shared_ptr<Segment> own_;
  const std::vector<Peer> peers_;
  Mutex mutex_;
  int next_ = 0;
  std::vector<Closed> closed_;  // by this rank, but not yet by all
};

}  // namespace torchddp::shm
