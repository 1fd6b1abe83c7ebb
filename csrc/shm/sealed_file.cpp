#include "shm/sealed_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <string>

#include "common/round_up.h"
#include "shm/errors.h"

namespace torchddp::shm {
namespace {

constexpr int64_t kPage = 4096;

}  // namespace

Fd make_sealed_file(int64_t bytes) {
  Fd file(memfd_create("torchddp", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) {
    throw_unavailable("memfd_create failed");
  }
  if (ftruncate(file.get(), bytes) != 0) {
    throw_unavailable("could not size shared memory of " + std::to_string(bytes) + " bytes");
  }
  // A peer that could shrink the file could make us touch what is no longer there.
  if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_unavailable("could not seal shared memory");
  }
  return file;
}

bool commit(const Fd& file, int64_t offset, int64_t bytes) {
  const auto end = offset + bytes;
  auto step = bytes;
  for (auto at = offset; at < end;) {
    const auto part = std::min(step, end - at);
    if (fallocate(file.get(), 0, at, part) == 0) {
      at += part;
    } else if (errno == EINTR) {
      // Before Linux 6.10 a signal undoes all of a call, and with a profiler the next one comes soon: less at a time, down to a page.
      step = std::max(part / 2, kPage);
    } else {
      const auto reason = errno;
      const auto first = round_up(offset, kPage);
      if (const auto last = at / kPage * kPage; last > first) {
        fallocate(file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first, last - first);
      }
      errno = reason;
      return false;
    }
  }
  return true;
}

int64_t sealed_bytes(const Fd& file) {
  struct stat info{};
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = fcntl(file.get(), F_GET_SEALS);  // -1 for what can't be sealed
  const bool sealed = seals >= 0 && (seals & kSeals) == kSeals;
  return sealed && fstat(file.get(), &info) == 0 ? info.st_size : -1;
}

}  // namespace torchddp::shm
