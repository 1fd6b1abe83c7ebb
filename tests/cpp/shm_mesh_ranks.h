// Ranks that are about to find each other, and what they may leave open.
#pragma once

#include <dirent.h>

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

}  // namespace torchddp::shm
