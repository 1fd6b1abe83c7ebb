#include "shm/sealed_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <string>

#include "shm/errors.h"

namespace torchddp::shm {

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
  int status = 0;
  do {
    status = fallocate(file.get(), 0, offset, bytes);
  } while (status != 0 && errno == EINTR);
  return status == 0;
}

int64_t sealed_bytes(const Fd& file) {
  struct stat info{};
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = fcntl(file.get(), F_GET_SEALS);  // -1 for what can't be sealed
  const bool sealed = seals >= 0 && (seals & kSeals) == kSeals;
  return sealed && fstat(file.get(), &info) == 0 ? info.st_size : -1;
}

}  // namespace torchddp::shm
