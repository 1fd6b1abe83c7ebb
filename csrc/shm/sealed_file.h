// Nameless files in memory whose size nobody can change: what is mapped stays there to be touched.
#pragma once

#include <cstdint>

#include "shm/fd.h"

namespace torchddp::shm {

// Without pages yet: see commit(). Throws Unavailable.
Fd make_sealed_file(int64_t bytes);
// Allocates pages now, so that a machine without room says no instead of sending SIGBUS later. False with errno set; then the pages
// that lie wholly in the range are given back.
bool commit(const Fd& file, int64_t offset, int64_t bytes);
// The size of a file from elsewhere, -1 if it is none of ours.
int64_t sealed_bytes(const Fd& file);

}  // namespace torchddp::shm
