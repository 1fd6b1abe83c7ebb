#include "shm/mesh.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <span>
#include <utility>

#include "common/deadline.h"
#include "common/forks.h"
#include "common/signals.h"
#include "shm/errors.h"
#include "shm/layout.h"

namespace torchddp::shm {
namespace {

constexpr size_t kAddressLength = 32;
// How often to check that the ranks waited for still exist.
constexpr std::chrono::milliseconds kLookAround{100};
// How often to retry what was blocked.
constexpr std::chrono::milliseconds kRetry{5};
// More than the number of ranks that can still connect.
constexpr size_t kMaxSilent = kMaxRanks;

// The first message on a connection; the segment's file descriptor is sent with it.
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
  if (path.size() >= sizeof(address.sun_path)) {  // another rank has published the name
    throw Unavailable("a rank's name for its shared memory has " + std::to_string(name.size()) +
                      " characters, which is too long for a socket");
  }
  std::ranges::copy(path, address.sun_path + 1);  // a leading zero byte: the abstract namespace
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
}

Fd make_socket() { return Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

// Empty, with errno set, if that fails.
Fd connect_to(const std::string& name) {
  sockaddr_un address;
  const auto length = fill_address(address, name);
  auto socket = make_socket();
  if (socket && ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    const int reason = errno;
    socket = Fd();
    errno = reason;
  }
  return socket;
}

// Whether something listens there. The only way to find out is to connect, without sending anything.
bool listens(const std::string& name) { return connect_to(name) || errno != ECONNREFUSED; }

// Reads what is available. Empty if it is not one of our hellos.
std::optional<Received> read_hello(int socket) {
  Received received;
  auto message = receive_with_fd(socket, std::as_writable_bytes(std::span(&received.hello, 1)));
  if (message.refused) {
    errno = EMFILE;
    throw_unavailable("could not take a local rank's segment");
  }
  if (!message.whole || received.hello.magic != kMagic) return std::nullopt;
  received.segment = std::move(message.fd);
  return received;
}

void check_version(const Hello& hello, const std::string& from) {
  if (hello.version != kVersion) {
    throw Unavailable(from + " speaks version " + std::to_string(hello.version) + " of the protocol, this rank " +
                      std::to_string(kVersion) + ": all ranks must run the same torchddp");
  }
}

ucred credentials_of(int socket) {
  ucred credentials{0, static_cast<uid_t>(-1), static_cast<gid_t>(-1)};
  socklen_t length = sizeof(credentials);
  getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length);
  return credentials;
}

// Checks everything that was read before it is trusted.
Mapping map_segment(const Received& received, int size, const std::string& from) {
  const auto bytes = sealed_bytes(received.segment);
  if (bytes < kDataOffset) {
    throw Unavailable("the segment of " + from + " is not a sealed torchddp segment");
  }
  Mapping mapping(received.segment.get(), bytes);
  const auto* header = reinterpret_cast<const Header*>(mapping.base());
  if (header->magic != kMagic || header->version != kVersion || header->header_bytes != sizeof(Header) ||
      header->segment_bytes != bytes || header->rank != received.hello.rank || header->size != size) {
    throw Unavailable("the segment of " + from + " has an unexpected header (version, size or rank differ)");
  }
  return mapping;
}

std::string local_rank(size_t rank) { return "local rank " + std::to_string(rank); }

// Note [How ranks meet]
// Each rank connects to those before it and accepts those after it. The connecting rank sends its segment and gets the other's
// in return; neither does so before it knows that the other belongs to the same user. Nothing here blocks except poll(). A
// listener with a full queue, and a segment that can't be sent because too many unread descriptors are in flight (RLIMIT_NOFILE
// limits those of a user), are retried, and incoming data is read meanwhile so that others can continue. Strangers at the
// listener hold up no one: a connection that sends anything else is closed, and if too many connections stay silent, so is the
// oldest of them. One of those may be a peer that was delayed; it connects again.
class Handshake {
 public:
  Handshake(int listener, const std::vector<std::string>& addresses, const Hello& hello, const Segment& own,
            Clock::time_point deadline)
      : listener_(listener), addresses_(addresses), hello_(hello), own_(own), rank_(static_cast<size_t>(hello.rank)),
        deadline_(deadline), seen_(rank_), others_(addresses.size()) {
    others_[rank_].knows_us = others_[rank_].is_known = true;
  }

  std::vector<Peer> run() {
    for (auto next_look = Clock::now() + kLookAround; true;) {
      bool is_held_up = false;
      is_limited_ = false;
      for (size_t rank = 0; rank < others_.size() && !is_limited_; ++rank) is_held_up |= !reach(rank);
      if (is_complete()) break;
      const auto now = Clock::now();
      if (now >= deadline_) fail_late();
      if (now >= next_look) {
        look_around();
        check_signals();
        next_look = now + kLookAround;
      }
      read(std::min({deadline_, next_look, is_held_up ? now + kRetry : deadline_}));
    }
    std::vector<Peer> peers(others_.size());
    for (size_t rank = 0; rank < others_.size(); ++rank) peers[rank] = std::move(others_[rank].peer);
    return peers;
  }

 private:
  struct Other {
    Peer peer;
    bool knows_us = false;  // has this rank's segment
    bool is_known = false;  // we have its segment
    std::string obstacle;   // why something must be retried
  };

  bool is_before(size_t rank) const { return rank < rank_; }
  int num_to_come() const {
    const auto first = others_.begin() + static_cast<std::ptrdiff_t>(rank_) + 1;
    return static_cast<int>(std::count_if(first, others_.end(), [](const Other& other) { return !other.is_known; }));
  }
  bool is_complete() const {
    return std::ranges::all_of(others_, [](const Other& other) { return other.knows_us && other.is_known; });
  }

  // Connects and sends the segment, as far as that is possible now. False if it should be retried soon.
  bool reach(size_t rank) {
    auto& other = others_[rank];
    if (!other.peer.socket && (!is_before(rank) || !connect(rank))) return !is_before(rank);  // that one connects to us
    return other.knows_us || introduce(rank);
  }

  bool connect(size_t rank) {
    auto socket = connect_to(addresses_[rank]);
    if (!socket && errno == EAGAIN) {
      others_[rank].obstacle = "too many connections are pending there";
      return false;
    }
    if (!socket) throw_unavailable("could not connect to " + local_rank(rank));
    // The listener may have taken over the name of a rank that is gone.
    if (const auto user = credentials_of(socket.get()).uid; user != geteuid()) {
      throw Unavailable(local_rank(rank) + " runs as user " + std::to_string(user) + ", this rank as " +
                        std::to_string(geteuid()));
    }
    others_[rank].peer.socket = std::move(socket);
    return true;
  }

  bool introduce(size_t rank) {
    auto& other = others_[rank];
    if (send_with_fd(other.peer.socket.get(), std::as_bytes(std::span(&hello_, 1)), own_.fd())) {
      other.knows_us = true;
      return true;
    }
    const int reason = errno;
    if (reason == ETOOMANYREFS) {
      other.obstacle = "this user has more file descriptors in flight between processes than ulimit -n allows";
      is_limited_ = true;
      return false;
    }
    if (reason == EAGAIN || reason == EINTR) {
      other.obstacle = "its socket is full";
      return false;
    }
    if (is_before(rank) && (reason == EPIPE || reason == ECONNRESET)) {
      stop_listening(rank);
      return false;
    }
    throw_unavailable("could not send the shared segment to " + local_rank(rank));
  }

  // Either we were mistaken for another program or the rank is gone; connecting again will tell.
  void stop_listening(size_t rank) {
    others_[rank].obstacle = "it hung up";
    others_[rank].peer.socket = Fd();
    others_[rank].knows_us = false;
  }

  // Reads everything that has arrived, or arrives until `until`.
  void read(Clock::time_point until) {
    std::vector<pollfd> entries;
    std::vector<size_t> asked;  // ranks whose answers are pending
    for (size_t rank = 0; rank < rank_; ++rank) {
      if (others_[rank].knows_us && !others_[rank].is_known) {
        entries.push_back({others_[rank].peer.socket.get(), POLLIN, 0});
        asked.push_back(rank);
      }
    }
    const auto first_silent = entries.size();
    for (const auto& socket : silent_) entries.push_back({socket.get(), POLLIN, 0});
    entries.push_back({num_to_come() > 0 ? listener_ : -1, POLLIN, 0});
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    if (poll(entries.data(), entries.size(), static_cast<int>(std::clamp<int64_t>(left, 0, 1000))) < 0) {
      if (errno != EINTR) throw_unavailable("waiting for local ranks");
      return;
    }
    for (size_t i = 0; i < asked.size(); ++i) {
      if (entries[i].revents != 0) receive_answer(asked[i]);
    }
    std::vector<Fd> still_silent;
    for (size_t i = 0; i < silent_.size(); ++i) {
      if (entries[first_silent + i].revents == 0) {
        still_silent.push_back(std::move(silent_[i]));
      } else if (auto received = read_hello(silent_[i].get())) {
        hear_visitor(std::move(silent_[i]), *received);
      }
    }
    silent_ = std::move(still_silent);
    if (entries.back().revents != 0) let_in();
  }

  // The answer of a rank that this one has connected to.
  void receive_answer(size_t rank) {
    const auto received = read_hello(others_[rank].peer.socket.get());
    if (!received) {
      stop_listening(rank);
      return;
    }
    check_version(received->hello, local_rank(rank));
    if (received->hello.rank != static_cast<int>(rank)) {
      throw Unavailable("something other than a torchddp peer answered in place of " + local_rank(rank));
    }
    know(rank, *received);
  }

  void hear_visitor(Fd socket, const Received& received) {
    check_version(received.hello, "a local rank");
    const auto rank = static_cast<size_t>(received.hello.rank);
    if (received.hello.rank <= hello_.rank || rank >= others_.size() || others_[rank].peer.socket ||
        !std::equal(received.hello.address.begin(), received.hello.address.end(), addresses_[rank].begin(),
                    addresses_[rank].end())) {
      return;  // another program
    }
    others_[rank].peer.socket = std::move(socket);
    know(rank, received);
  }

  void know(size_t rank, const Received& received) {
    auto& other = others_[rank];
    other.peer.pid = credentials_of(other.peer.socket.get()).pid;
    other.peer.segment = map_segment(received, static_cast<int>(others_.size()), local_rank(rank));
    if (other.peer.pid > 0) {
      other.peer.pidfd = Fd(static_cast<int>(syscall(SYS_pidfd_open, other.peer.pid, 0)));
    }
    other.is_known = true;
  }

  void let_in() {
    for (int i = 0; i < kMaxRanks; ++i) {
      Fd socket(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
          throw_unavailable("could not accept a local rank");
        }
        return;
      }
      // Any user of the machine can connect to an abstract socket.
      if (credentials_of(socket.get()).uid == geteuid()) silent_.push_back(std::move(socket));
      if (silent_.size() > kMaxSilent) {
        silent_.erase(silent_.begin());
        return;  // first read what they may have sent
      }
    }
  }

  // A rank that has given up will not connect. Checks one missing rank at a time: every rank does this, and each check costs
  // the other side a connection.
  void look_around() {
    if (num_to_come() == 0) return;
    do {
      seen_ = seen_ + 1 < others_.size() ? seen_ + 1 : rank_ + 1;
    } while (others_[seen_].is_known);
    if (!listens(addresses_[seen_])) throw Unavailable(local_rank(seen_) + " gave up or died");
  }

  [[noreturn]] void fail_late() const {
    for (size_t rank = 0; rank < others_.size(); ++rank) {
      const auto& other = others_[rank];
      if (!other.knows_us && !other.obstacle.empty()) {
        throw Unavailable("timed out reaching " + local_rank(rank) + ": " + other.obstacle);
      }
    }
    if (const auto missing = num_to_come()) {
      throw Unavailable("timed out waiting for " + std::to_string(missing) + " local ranks to connect");
    }
    const auto silent = std::ranges::find_if(others_, [](const Other& other) { return !other.is_known; });
    throw Unavailable("timed out waiting for the segment of " +
                      local_rank(static_cast<size_t>(silent - others_.begin())));
  }

  const int listener_;
  const std::vector<std::string>& addresses_;
  const Hello& hello_;
  const Segment& own_;
  const size_t rank_;
  const Clock::time_point deadline_;
  bool is_limited_ = false;    // all ranks face the same obstacle
  size_t seen_;                // which expected rank was checked last
  std::vector<Other> others_;  // by rank; this rank's own entry is unused
  std::vector<Fd> silent_;     // connected but silent so far, oldest first
};

std::string read_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) {
    throw_unavailable(std::string("could not read ") + path);  // or this rank would appear to be on another host
  }
  return line;
}

}  // namespace

std::string host_identity() {
  std::array<char, 128> link{};
  const auto length = readlink("/proc/self/ns/net", link.data(), link.size() - 1);
  if (length <= 0) throw_unavailable("could not read /proc/self/ns/net");
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

Listener::Listener() : socket_(make_socket()), address_(random_name()) {
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
  const int size = static_cast<int>(addresses.size());
  if (size > kMaxRanks) {
    throw Unavailable(std::to_string(size) + " ranks on one host; at most " + std::to_string(kMaxRanks) +
                      " can share memory");
  }
  Hello hello;
  hello.rank = rank;
  hello.size = size;
  std::copy_n(address_.begin(), kAddressLength, hello.address.begin());
  return Handshake(listener.get(), addresses, hello, own, deadline_after(timeout)).run();
}

Mesh::Mesh(std::string name, int rank, std::shared_ptr<Segment> own, std::vector<Peer> peers)
    : name_(std::move(name)), rank_(rank), forks_(forks()), own_(std::move(own)), peers_(std::move(peers)) {}

Mesh::~Mesh() {
  const auto is_kept = [&](const Closed& closed) { return is_needed(closed); };
  if (!is_inherited() && std::ranges::any_of(closed_, is_kept)) own_->keep_pages();
}

bool Mesh::is_inherited() const { return forks() != forks_; }

std::optional<ChannelEnd> Mesh::open() {
  std::vector<Closed> done;  // its memory is released without holding the lock
  const std::lock_guard lock(mutex_);
  const auto first =
      std::partition(closed_.begin(), closed_.end(), [&](const Closed& closed) { return is_needed(closed); });
  done.assign(std::make_move_iterator(first), std::make_move_iterator(closed_.end()));
  closed_.erase(first, closed_.end());
  for (const auto& closed : done) release(closed.ends[rank_]);
  if (next_ == kMaxChannels) return std::nullopt;
  ChannelEnd end{.number = next_};
  if (end.number > 0) {  // the first one has the header that the segment was made with
    auto* memory = own_->allocate(sizeof(Header));
    if (memory == nullptr) return std::nullopt;
    end.header = own_->offset_of(memory);
    own_->write_header(end.header);
  }
  ++next_;
  return end;
}

std::vector<SegmentView> Mesh::view(const std::vector<ChannelEnd>& ends) const {
  std::vector<SegmentView> views;
  for (size_t i = 0; i < peers_.size(); ++i) {
    const bool self = static_cast<int>(i) == rank_;
    const auto bytes = self ? own_->bytes() : peers_[i].segment.bytes();
    const auto& [number, header] = ends.at(i);
    const bool fits = header == 0 || (header >= kDataOffset && header <= bytes - kDataOffset);
    if (!fits || header % static_cast<int64_t>(alignof(Header)) != 0 || number < 0 || number >= kMaxChannels) {
      throw Unavailable("the channel of " + local_rank(i) + " is not in its segment");
    }
    views.push_back({self ? own_->base() : peers_[i].segment.base(), bytes, header});
  }
  return views;
}

void Mesh::drop(const ChannelEnd& end) {
  if (!is_inherited()) {
    const std::lock_guard lock(mutex_);
    release(end);
  }
}

void Mesh::close(std::vector<ChannelEnd> ends, std::shared_ptr<void> kept, bool forever) {
  if (is_inherited()) return;
  const std::lock_guard lock(mutex_);
  auto* first = reinterpret_cast<Header*>(own_->base());
  first->closed[ends[rank_].number].store(1);
  closed_.push_back({std::move(ends), std::move(kept), forever});
}

const Header& Mesh::first_header(size_t rank) const {
  const auto* base = static_cast<int>(rank) == rank_ ? own_->base() : peers_[rank].segment.base();
  return *reinterpret_cast<const Header*>(base);
}

// By a rank that has not closed the channel, or by others than these ranks.
bool Mesh::is_needed(const Closed& closed) const {
  for (size_t i = 0; i < closed.ends.size(); ++i) {
    if (first_header(i).closed[closed.ends[i].number].load() == 0) return true;
  }
  return closed.forever;
}

void Mesh::release(const ChannelEnd& end) {
  if (end.header != 0) own_->release(own_->base() + end.header);
}

}  // namespace torchddp::shm
