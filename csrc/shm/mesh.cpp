#include "shm/mesh.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <span>
#include <utility>

#include "common/signals.h"
#include "shm/errors.h"
#include "shm/fd_passing.h"
#include "shm/layout.h"
#include "shm/sealed_file.h"

namespace torchddp::shm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kAddressLength = 32;
// How often to see whether those that are waited for are still there.
constexpr std::chrono::milliseconds kLookAround{100};

// First words on a connection; the segment's file descriptor travels with them.
struct Hello {
  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  int32_t rank = 0;
  int32_t size = 0;
  std::array<char, kAddressLength> address{};  // of the sender
};

struct Received {
  Hello hello;
  Fd segment;
};

std::string random_name() {
  std::array<unsigned char, kAddressLength / 2> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw_unavailable("no random bytes for the name of a socket");
  }
  std::string name;
  for (const auto byte : bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    name += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return name;
}

socklen_t fill_address(sockaddr_un& address, const std::string& name) {
  address = {};
  address.sun_family = AF_UNIX;
  const std::string path = "torchddp-" + name;
  std::copy(path.begin(), path.end(), address.sun_path + 1);  // a leading zero byte: the abstract namespace
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
}

// Until one of `entries` has something; says in them which.
// False when the time is over.
bool is_readable(std::span<pollfd> entries, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    const int ready = poll(entries.data(), entries.size(),
                           static_cast<int>(std::clamp<int64_t>(left.count(), 0, kSignalInterval.count())));
    if (ready < 0 && errno != EINTR) {
      throw_unavailable("waiting for local ranks");
    }
    if (ready > 0) {
      return true;
    }
    check_signals();
    if (left.count() <= 0) {
      return false;
    }
  }
}

void wait_readable(std::span<pollfd> entries, Clock::time_point deadline, const std::string& for_what) {
  if (!is_readable(entries, deadline)) {
    throw Unavailable("timed out waiting for " + for_what);
  }
}

// Whether somebody listens there. To ask is to visit, without a word.
bool listens(const std::string& name) {
  sockaddr_un address;
  const auto length = fill_address(address, name);
  const Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  return !socket || ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0 ||
         errno != ECONNREFUSED;
}

void send_hello(int socket, const Hello& hello, int segment_fd) {
  if (!send_with_fd(socket, std::as_bytes(std::span(&hello, 1)), segment_fd)) {
    throw_unavailable("could not give the shared segment to a peer");
  }
}

// What is there to be read. Nothing if it is not a hello of ours.
std::optional<Received> read_hello(int socket) {
  Received received;
  auto message = receive_with_fd(socket, std::as_writable_bytes(std::span(&received.hello, 1)));
  if (message.refused) {
    errno = EMFILE;
    throw_unavailable("could not take a local rank's segment");
  }
  if (!message.whole || received.hello.magic != kMagic) {
    return std::nullopt;
  }
  received.segment = std::move(message.fd);
  return received;
}

void check_version(const Hello& hello, const std::string& from) {
  if (hello.version != kVersion) {
    throw Unavailable(from + " speaks version " + std::to_string(hello.version) + " of the protocol, this rank " +
                      std::to_string(kVersion) + ": all ranks must run the same torchddp");
  }
}

// Of the rank that this one has connected to.
Received receive_hello(int socket, int rank, Clock::time_point deadline) {
  const auto from = "local rank " + std::to_string(rank);
  pollfd entry{socket, POLLIN, 0};
  wait_readable({&entry, 1}, deadline, "the segment of " + from);
  auto received = read_hello(socket);
  if (!received) {
    throw Unavailable("something that is no peer of ours answered in the place of " + from);
  }
  check_version(received->hello, from);
  if (received->hello.rank != rank) {
    throw Unavailable("something that is no peer of ours answered in the place of " + from);
  }
  return *std::move(received);
}

ucred credentials_of(int socket) {
  ucred credentials{0, static_cast<uid_t>(-1), static_cast<gid_t>(-1)};
  socklen_t length = sizeof(credentials);
  getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length);
  return credentials;
}

bool same_user(int socket) { return credentials_of(socket).uid == geteuid(); }

// Who connects to a listener, until each has said who it is. One that never does holds up nobody.
class Visitors {
 public:
  explicit Visitors(int listener) : listener_(listener) {}

  // The next that says something of ours. While nobody does, `look_around` is called now and then.
  template <typename LookAround>
  std::pair<Fd, Received> next(Clock::time_point deadline, const std::string& for_what, LookAround&& look_around) {
    while (true) {
      std::vector<pollfd> entries{{listener_, POLLIN, 0}};
      for (const auto& socket : silent_) {
        entries.push_back({socket.get(), POLLIN, 0});
      }
      if (const auto soon = Clock::now() + kLookAround; soon < deadline) {
        if (!is_readable(entries, soon)) {
          look_around();
          continue;
        }
      } else {
        wait_readable(entries, deadline, for_what);
      }
      for (size_t i = silent_.size(); i-- > 0;) {
        if (entries[i + 1].revents == 0) {
          continue;
        }
        Fd socket = std::move(silent_[i]);
        silent_.erase(silent_.begin() + static_cast<std::ptrdiff_t>(i));
        if (auto received = read_hello(socket.get())) {
          return {std::move(socket), *std::move(received)};
        }
      }
      if (entries[0].revents != 0) {
        greet();
      }
    }
  }

 private:
  void greet() {
    Fd socket(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket) {
      if (errno != EINTR && errno != ECONNABORTED) {
        throw_unavailable("could not accept a local rank");
      }
    } else if (same_user(socket.get())) {  // abstract sockets are open to every user of the machine
      silent_.push_back(std::move(socket));
    }
  }

  const int listener_;
  std::vector<Fd> silent_;
};

// Everything that is read before it is trusted.
Mapping map_segment(const Received& received, int size, const std::string& from) {
  const auto bytes = sealed_bytes(received.segment);
  if (bytes < kDataOffset) {
    throw Unavailable("the segment of " + from + " is no sealed segment of ours");
  }
  Mapping mapping(received.segment.get(), bytes);
  const auto* header = reinterpret_cast<const Header*>(mapping.base());
  if (header->magic != kMagic || header->version != kVersion || header->header_bytes != sizeof(Header) ||
      header->segment_bytes != bytes || header->rank != received.hello.rank || header->size != size) {
    throw Unavailable("the segment of " + from + " has a header that is not ours (version, size or rank differ)");
  }
  return mapping;
}

Peer make_peer(Fd socket, const Received& received, int size, const std::string& from) {
  const auto credentials = credentials_of(socket.get());
  if (credentials.uid != geteuid()) {
    throw Unavailable(from + " runs as user " + std::to_string(credentials.uid) + ", this rank as " +
                      std::to_string(geteuid()));
  }
  Peer peer;
  peer.pid = credentials.pid;
  peer.segment = map_segment(received, size, from);
  if (peer.pid > 0) {
    peer.pidfd = Fd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
  }
  peer.socket = std::move(socket);
  return peer;
}

std::string read_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) {
    throw_unavailable(std::string("could not read ") + path);  // or this rank would seem to be on another host
  }
  return line;
}

}  // namespace

std::string host_identity() {
  std::array<char, 128> link{};
  const auto length = readlink("/proc/self/ns/net", link.data(), link.size() - 1);
  if (length <= 0) {
    throw_unavailable("could not read /proc/self/ns/net");
  }
  const char* chosen = std::getenv("TORCHDDP_HOST_ID");
  return read_line("/proc/sys/kernel/random/boot_id") + " " + std::string(link.data(), static_cast<size_t>(length)) +
         " " + (chosen != nullptr ? chosen : "");
}

bool Peer::gone() const {
  std::array<pollfd, 2> entries{{{socket.get(), POLLRDHUP, 0}, {pidfd.get(), POLLIN, 0}}};
  const nfds_t count = pidfd ? 2 : 1;
  return poll(entries.data(), count, 0) > 0 &&
         ((entries[0].revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0 || (pidfd && entries[1].revents != 0));
}

Listener::Listener() : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)), address_(random_name()) {
  sockaddr_un address;
  const auto length = fill_address(address, address_);
  if (!socket_ || bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(socket_.get(), kMaxRanks) != 0) {
    throw_unavailable("could not listen on a Unix socket");
  }
}

std::vector<Peer> Listener::connect(const std::vector<std::string>& addresses, int rank, const Segment& own,
                                    std::chrono::milliseconds timeout) {
  const Fd listener = std::move(socket_);
  const auto deadline = Clock::now() + timeout;
  const int size = static_cast<int>(addresses.size());
  if (size > kMaxRanks) {
    throw Unavailable(std::to_string(size) + " ranks on one host; at most " + std::to_string(kMaxRanks) +
                      " can share memory");
  }
  Hello hello;
  hello.rank = rank;
  hello.size = size;
  std::copy_n(address_.begin(), kAddressLength, hello.address.begin());
  std::vector<Peer> peers(addresses.size());
  std::vector<Fd> outgoing;
  // Each connects to those before it, and is connected to by those after it: connecting never waits.
  for (int peer = 0; peer < rank; ++peer) {
    sockaddr_un address;
    const auto length = fill_address(address, addresses[static_cast<size_t>(peer)]);
    Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (!socket || ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
      throw_unavailable("could not connect to local rank " + std::to_string(peer));
    }
    send_hello(socket.get(), hello, own.fd());
    outgoing.push_back(std::move(socket));
  }
  Visitors visitors(listener.get());
  for (int missing = size - 1 - rank; missing > 0;) {
    auto [socket, received] = visitors.next(deadline, std::to_string(missing) + " local ranks to connect", [&] {
      for (int peer = rank + 1; peer < size; ++peer) {
        if (!peers[static_cast<size_t>(peer)].socket && !listens(addresses[static_cast<size_t>(peer)])) {
          throw Unavailable("local rank " + std::to_string(peer) + " has given up, or died");
        }
      }
    });
    check_version(received.hello, "a local rank");
    const auto from = "local rank " + std::to_string(received.hello.rank);
    const auto peer = static_cast<size_t>(received.hello.rank);
    if (received.hello.rank <= rank || received.hello.rank >= size || peers[peer].socket ||
        !std::equal(received.hello.address.begin(), received.hello.address.end(), addresses[peer].begin(),
                    addresses[peer].end())) {
      continue;  // a stranger
    }
    send_hello(socket.get(), hello, own.fd());
    peers[peer] = make_peer(std::move(socket), received, size, from);
    --missing;
  }
  for (int peer = 0; peer < rank; ++peer) {
    const auto from = "local rank " + std::to_string(peer);
    auto& socket = outgoing[static_cast<size_t>(peer)];
    const auto received = receive_hello(socket.get(), peer, deadline);
    peers[static_cast<size_t>(peer)] = make_peer(std::move(socket), received, size, from);
  }
  return peers;
}

}  // namespace torchddp::shm
