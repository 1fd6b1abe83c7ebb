// Why shared memory can't be used here.
#pragma once

#include <sys/resource.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace torchddp::shm {

// Setup failed; the ranks fall back together, or tell the user.
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void throw_unavailable(const std::string& what) {
  auto reason = std::generic_category().message(errno);
  if (errno == EMFILE) {  // only this process is affected
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    reason += " in this process, which may have " + std::to_string(limit.rlim_cur) + " (ulimit -n)";
  }
  throw Unavailable(what + ": " + reason);
}

}  // namespace torchddp::shm
