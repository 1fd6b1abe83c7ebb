// Ranks before they connect, and checks of what they leave open.
#pragma once

#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "shm/mesh.h"
#include "shm_ranks.h"

namespace torchddp::shm {

inline int open_files() {
  int count = 0;
  DIR* directory = opendir("/proc/self/fd");
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

struct Ranks {
  explicit Ranks(int size) : listeners(static_cast<size_t>(size)) {
    for (const Listener& listener : listeners) addresses.push_back(listener.address());
    for (int rank = 0; rank < size; ++rank) segments.push_back(std::make_unique<Segment>(rank, size, 0));
  }
  std::vector<Peer> connect(int rank, milliseconds timeout = kPatience) {
    return listeners[static_cast<size_t>(rank)].connect(addresses, rank, *segments[static_cast<size_t>(rank)], timeout);
  }

  std::vector<Listener> listeners;
  std::vector<std::string> addresses;
  std::vector<std::unique_ptr<Segment>> segments;
};

inline socklen_t address_of(const std::string& name, sockaddr_un& address) {
  address.sun_family = AF_UNIX;
  const std::string path = "torchddp-" + name;
  std::copy(path.begin(), path.end(), address.sun_path + 1);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
}

// Replaces a rank's.
inline Fd listen_at(const std::string& name, int backlog) {
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  const auto length = address_of(name, address);
  require(bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
              listen(socket.get(), backlog) == 0,
          "could not listen");
  return socket;
}

// A process that knows a listener's name.
class Stranger {
 public:
  explicit Stranger(const std::string& address) : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un name{};
    const auto length = address_of(address, name);
    require(::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&name), length) == 0,
            "the stranger could not connect");
  }

  void send(const void* data, size_t bytes, const std::vector<int>& fds) const {
    iovec part{const_cast<void*>(data), bytes};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(4 * sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (!fds.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
      auto* rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
    }
    require(sendmsg(socket_.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes),
            "the stranger could not send");
  }

 private:
  Fd socket_;
};

}  // namespace torchddp::shm
