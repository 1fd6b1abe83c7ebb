// Why shared memory can't be used here.
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace torchddp::shm {

// Setting up failed; the ranks fall back together, or tell the user.
class Unavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void throw_unavailable(const std::string& what) {
  throw Unavailable(what + ": " + std::generic_category().message(errno));
}

}  // namespace torchddp::shm
