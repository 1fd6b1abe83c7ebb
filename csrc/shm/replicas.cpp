#include "shm/replicas.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>
#include <string>

#include "common/deadline.h"
#include "shm/errors.h"
#include "shm/fd_passing.h"
#include "shm/sealed_file.h"

namespace torchddp::shm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kParcelMagic = 0x316c706572646474;  // "tddrepl1" in memory
// How often to see whether waiting still makes sense.
constexpr std::chrono::milliseconds kLookAround{100};

// What travels with the file of a rank.
struct Parcel {
  uint64_t magic = kParcelMagic;
  int64_t serial = 0;
};

// Of a file for so many bytes: whole pages, one at least.
int64_t file_bytes(int64_t bytes) {
  const auto page = static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  return std::max<int64_t>((bytes + page - 1) / page, 1) * page;
}

std::string local_rank(size_t rank) { return "local rank " + std::to_string(rank); }

}  // namespace

Replicas::Replicas(int64_t own_bytes) : file_(make_sealed_file(file_bytes(own_bytes))) {
  const auto bytes = file_bytes(own_bytes);
  if (!commit(file_, 0, bytes)) {
    throw_unavailable("no room for " + std::to_string(bytes) + " bytes of shared memory");
  }
  masters_ = Mapping(file_.get(), bytes);
  probe(PrivateView(file_.get(), bytes), masters_.base());
}

// Whether the kernel tells changed pages from others, and gives them up.
void Replicas::probe(PrivateView view, std::byte* shared) {
  auto* seen = reinterpret_cast<std::atomic<unsigned char>*>(view.base());
  auto* master = reinterpret_cast<std::atomic<unsigned char>*>(shared);
  bool works = seen->load() == 0 && view.changed().empty();
  seen->store(1);
  const auto changed = view.changed();
  works = works && changed.size() == 1 && changed[0].begin == 0 && master->load() == 0;
  if (works) {
    works = view.drop(changed[0]) && view.changed().empty() && seen->load() == 0;
    master->store(2);
    works = works && seen->load() == 2;
    master->store(0);
  }
  if (!works) {
    throw Unavailable("this kernel does not tell which pages a process has changed, or all memory is locked");
  }
}

void Replicas::exchange(const std::vector<Peer>& peers, int rank, const std::vector<int64_t>& bytes, int64_t serial,
                        std::chrono::milliseconds timeout, const std::function<void()>& keep_waiting) {
  const auto deadline = deadline_after(timeout);
  rank_ = rank;
  const Parcel parcel{.serial = serial};
  for (size_t peer = 0; peer < peers.size(); ++peer) {
    if (static_cast<int>(peer) != rank &&
        !send_with_fd(peers[peer].socket.get(), std::as_bytes(std::span(&parcel, 1)), file_.get())) {
      throw_unavailable("could not give parameters to " + local_rank(peer));
    }
  }
  for (size_t peer = 0; peer < peers.size(); ++peer) {
    const auto expected = file_bytes(bytes[peer]);
    if (static_cast<int>(peer) == rank) {
      replicas_.push_back({Fd(), PrivateView(file_.get(), expected)});
      continue;
    }
    Fd file;
    try {
      file = take_file(peers[peer].socket.get(), serial, expected, deadline, keep_waiting);
    } catch (const Unavailable& problem) {
      throw Unavailable(local_rank(peer) + ": " + problem.what());
    }
    PrivateView view(file.get(), expected);
    replicas_.push_back({std::move(file), std::move(view)});
  }
}

Fd Replicas::take_file(int socket, int64_t serial, int64_t bytes, Clock::time_point deadline,
                       const std::function<void()>& keep_waiting) const {
  while (true) {
    pollfd entry{socket, POLLIN, 0};
    const int ready = poll(&entry, 1, static_cast<int>(kLookAround.count()));
    if (ready < 0 && errno != EINTR) {
      throw_unavailable("waiting for its parameters");
    }
    if (ready <= 0) {
      keep_waiting();
      if (Clock::now() >= deadline) {
        throw Unavailable("its parameters did not come in time");
      }
      continue;
    }
    Parcel parcel;
    auto message = receive_with_fd(socket, std::as_writable_bytes(std::span(&parcel, 1)));
    if (message.refused) {
      errno = EMFILE;
      throw_unavailable("could not take its parameters");
    }
    if (!message.whole || parcel.magic != kParcelMagic) {
      throw Unavailable("it has died, or what came is not ours");
    }
    if (parcel.serial < serial) {
      continue;  // of an exchange that failed on this rank before it came here
    }
    if (parcel.serial != serial || sealed_bytes(message.fd) != bytes) {
      throw Unavailable("its parameters have another size");
    }
    return std::move(message.fd);
  }
}

void Replicas::publish() {
  const auto& own = replicas_[static_cast<size_t>(rank_)].view;
  for (const auto& range : own.changed()) {
    std::memcpy(masters() + range.begin, own.base() + range.begin, static_cast<size_t>(range.end - range.begin));
  }
}

void Replicas::refresh() {
  bool found = false;
  for (auto& replica : replicas_) {
    const int fd = replica.file ? replica.file.get() : file_.get();
    for (const auto& range : replica.view.changed()) {
      found = true;
      if (drops_ < kMaxDrops && replica.view.drop(range)) {
        continue;
      }
      for (auto at = range.begin; at < range.end;) {
        const auto got =
            pread(fd, replica.view.base() + at, static_cast<size_t>(range.end - at), static_cast<off_t>(at));
        if (got <= 0 && errno != EINTR) {
          throw_unavailable("could not read parameters");
        }
        at += std::max<int64_t>(got, 0);
      }
    }
  }
  drops_ += found ? 1 : 0;
}

}  // namespace torchddp::shm
