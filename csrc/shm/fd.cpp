#include "shm/fd.h"

#include <sys/socket.h>

#include <array>
#include <cstring>

namespace torchddp::shm {
namespace {

// A message, and room for one file descriptor beside it.
struct Envelope {
  explicit Envelope(std::span<const std::byte> message) : data{const_cast<std::byte*>(message.data()), message.size()} {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }
  Envelope& operator=(Envelope&&) = delete;  // header points into it

  iovec data;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
};

}  // namespace

bool send_with_fd(int socket, std::span<const std::byte> message, int fd) {
  Envelope envelope(message);
  auto* rights = CMSG_FIRSTHDR(&envelope.header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(rights), &fd, sizeof(int));
  return sendmsg(socket, &envelope.header, MSG_NOSIGNAL) == static_cast<ssize_t>(message.size());
}

ReceivedFd receive_with_fd(int socket, std::span<std::byte> message) {
  ReceivedFd received;
  Envelope envelope(message);
  auto& header = envelope.header;
  const auto got = recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  const auto* rights = got >= 0 ? CMSG_FIRSTHDR(&header) : nullptr;
  size_t num_fds = 0;
  if (rights != nullptr && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS) {
    num_fds = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);  // two fit, for alignment: whatever came is ours to close
    for (size_t i = 0; i < num_fds; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(rights) + i * sizeof(int), sizeof(int));
      received.fd = Fd(fd);
    }
  }
  received.refused = num_fds == 0 && (header.msg_flags & MSG_CTRUNC) != 0;
  received.whole = got == static_cast<ssize_t>(message.size()) && num_fds == 1;
  return received;
}

}  // namespace torchddp::shm
