// Messages that carry a file descriptor to another process, over a Unix socket.
#pragma once

#include <cstddef>
#include <span>

#include "shm/fd.h"

namespace torchddp::shm {

// The whole message or nothing: then false, with errno set.
bool send_with_fd(int socket, std::span<const std::byte> message, int fd);

struct ReceivedFd {
  bool whole = false;    // a message of the expected size came, with exactly one file descriptor
  bool refused = false;  // this process may hold no more of them
  Fd fd;
};

// What is there to be read now, without waiting.
ReceivedFd receive_with_fd(int socket, std::span<std::byte> message);

}  // namespace torchddp::shm
