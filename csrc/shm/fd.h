// File descriptors, and messages that carry one to another process over a Unix socket.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <span>
#include <utility>

namespace torchddp::shm {

// Closes itself.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Sends the whole message or nothing; in that case returns false with errno set.
bool send_with_fd(int socket, std::span<const std::byte> message, int fd);

struct ReceivedFd {
  bool whole = false;    // a message of the expected size came, with exactly one file descriptor
  bool refused = false;  // this process has reached its limit of open files
  Fd fd;
};

// Reads what is available now, without waiting.
ReceivedFd receive_with_fd(int socket, std::span<std::byte> message);

}  // namespace torchddp::shm
