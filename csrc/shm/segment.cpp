#include "shm/segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <new>
#include <string>

#include "common/forks.h"
#include "common/round_up.h"
#include "shm/errors.h"
#include "shm/layout.h"
#include "shm/processors.h"

namespace torchddp::shm {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = 2 << 20;

// May be newer than the build's headers (Linux 6.1 and 5.14). Older kernels refuse, and pages appear when touched.
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

// Large blocks don't share pages, so that pages can be returned with their block.
int64_t alignment_for(int64_t bytes) { return bytes >= kHugePage ? kHugePage : bytes >= kPage ? kPage : 64; }

// This process's address space that is in use.
int64_t mapped_bytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// As much as the machine could ever hold, but no more than kFairShares of an even division: each rank maps every segment, and
// 128 times the memory of a large machine would fill its address space. All segments together take at most half of what a limit
// on the address space leaves. Also no more than the file size limit, which is enforced by a fatal signal.
int64_t virtual_bytes(int size) {
  constexpr int kFairShares = 4;
  int64_t bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  bytes = bytes / std::max(size, kFairShares) * kFairShares;
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    bytes = std::min(bytes, static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, INT64_MAX)));
  }
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    const auto left = static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, INT64_MAX)) - mapped_bytes();
    bytes = std::min(bytes, std::max<int64_t>(left, 0) / 2 / size);
  }
  return bytes / kHugePage * kHugePage;
}

// Has no pages yet: see commit().
Fd make_sealed_file(int64_t bytes) {
  Fd file(memfd_create("torchddp", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) throw_unavailable("memfd_create failed");
  if (ftruncate(file.get(), bytes) != 0) {
    throw_unavailable("could not size shared memory of " + std::to_string(bytes) + " bytes");
  }
  // If a peer could shrink the file, touching our mapping could fault.
  if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_unavailable("could not seal shared memory");
  }
  return file;
}

// Uses huge pages as far as the kernel has them ready: it fills up those that hold a small page, in a tenth of the time that
// the small pages would take. Stops at the first one that it can't get.
void take_huge_pages(const Fd& file, std::byte* base, int64_t offset, int64_t bytes) {
  const auto end = offset + bytes / kHugePage * kHugePage;
  for (auto at = offset; at < end; at += kHugePage) {
    if (fallocate(file.get(), 0, at, kPage) != 0) return;
  }
  madvise(base + offset, end - offset, MADV_COLLAPSE);
}

// Allocates pages now, so that a machine without room reports an error instead of sending SIGBUS later. False with errno set.
bool commit(const Fd& file, int64_t offset, int64_t bytes) {
  const auto end = offset + bytes;
  auto step = bytes;
  for (auto at = offset; at < end;) {
    const auto part = std::min(step, end - at);
    if (fallocate(file.get(), 0, at, part) == 0) {
      at += part;
    } else if (errno == EINTR) {
      // Before Linux 6.10 a signal undoes the whole call, and under a profiler the next one comes soon; so try less at a time,
      // down to a page.
      step = std::max(part / 2, kPage);
    } else {
      return false;
    }
  }
  return true;
}

// Preserves errno.
void give_back(const Fd& file, int64_t offset, int64_t bytes) {
  const auto reason = errno;
  if (bytes >= kPage) {  // only such a block has its pages to itself
    fallocate(file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
  }
  errno = reason;
}

// All mappings, for the children of fork().
class Mapped {
 public:
  static Mapped& instance() {
    static auto* const mapped = new Mapped;  // outlives what is destroyed at exit
    return *mapped;
  }

  void add(std::byte* base, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    areas_[base] = {bytes, -1};
  }
  void keep_private(std::byte* base, int fd) {
    const std::lock_guard lock(mutex_);
    areas_[base].fd = fd;
  }
  // Unmaps it, so that a child that is forked meanwhile puts nothing in its place.
  void remove(std::byte* base, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    areas_.erase(base);
    munmap(base, bytes);
  }

 private:
  struct Area {
    int64_t bytes = 0;
    int fd = -1;  // -1: a peer's
  };

  Mapped() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] {
                     instance().part_from_parent();
                     instance().mutex_.unlock();
                   });
  }

  // In the child, where only calls that are safe in signal handlers are allowed.
  void part_from_parent() {
    constexpr int kProtection = PROT_READ | PROT_WRITE;
    constexpr int kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    for (const auto& [base, area] : areas_) {
      mmap(base, area.bytes, kProtection, kFlags | (area.fd < 0 ? MAP_ANONYMOUS : 0), area.fd, 0);
    }
  }

  std::mutex mutex_;
  std::map<std::byte*, Area> areas_;
};

}  // namespace

int64_t sealed_bytes(const Fd& file) {
  struct stat info{};
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = fcntl(file.get(), F_GET_SEALS);  // -1 for what can't be sealed
  const bool sealed = seals >= 0 && (seals & kSeals) == kSeals;
  return sealed && fstat(file.get(), &info) == 0 ? info.st_size : -1;
}

Mapping::Mapping(int fd, int64_t bytes) : bytes_(bytes) {
  const auto failed = [&] { throw_unavailable("could not map " + std::to_string(bytes) + " bytes of shared memory"); };
  // Reserves more address space than needed: a huge page can only be mapped as one at a multiple of its size.
  const auto length = static_cast<size_t>(bytes);
  auto* room = mmap(nullptr, length + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) failed();
  auto* const begin = static_cast<std::byte*>(room);
  auto* const end = begin + length + kHugePage;
  const auto ahead = -reinterpret_cast<uintptr_t>(room) % kHugePage;
  auto* aligned = mmap(begin + ahead, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0);
  if (aligned == MAP_FAILED) {
    const auto reason = errno;
    munmap(room, length + kHugePage);
    errno = reason;
    failed();
  }
  base_ = static_cast<std::byte*>(aligned);
  if (ahead > 0) munmap(begin, ahead);
  munmap(base_ + length, end - base_ - length);
  madvise(base_, bytes, MADV_DONTDUMP);  // the peers' memory, and holes that a dump would fill
  madvise(base_, bytes, MADV_HUGEPAGE);  // an optimization that the machine may not allow
  Mapped::instance().add(base_, bytes_);
}

void Mapping::keep_private(int fd) const { Mapped::instance().keep_private(base_, fd); }

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (base_ != nullptr) Mapped::instance().remove(base_, bytes_);
}

Segment::Segment(int rank, int size, int64_t limit_bytes) : rank_(rank), size_(size), forks_(forks()) {
  const auto bytes = virtual_bytes(size);
  if (bytes < kDataOffset + kHugePage) {
    throw Unavailable("the limit on file sizes or address space (ulimit -f, -v) leaves no room for a shared segment");
  }
  fd_ = make_sealed_file(bytes);
  mapping_ = Mapping(fd_.get(), bytes);
  mapping_.keep_private(fd_.get());
  if (!commit(fd_, 0, kDataOffset)) throw_unavailable("no room for a shared segment");
  write_header(0);
  limit_bytes_ = limit_bytes > 0 ? limit_bytes : bytes;
  free_.emplace(kDataOffset, bytes - kDataOffset);
}

void Segment::write_header(int64_t offset) {
  auto* header = new (base() + offset) Header{};
  header->magic = kMagic;
  header->version = kVersion;
  header->header_bytes = sizeof(Header);
  header->segment_bytes = bytes();
  header->rank = rank_;
  header->size = size_;
  header->cpu_mask = allowed_processors();
  const auto quota = processor_quota();
  header->quota = quota.processors;
  header->quota_group = quota.group;
  header->state.store(static_cast<uint32_t>(RankState::kOpen));
  header->culprit.store(-1);
}

void* Segment::allocate(int64_t bytes) {
  if (bytes > this->bytes() || forks() != forks_) {
    errno = ENOSPC;
    return nullptr;
  }
  bytes = round_up(std::max<int64_t>(bytes, 1), 64);
  const auto alignment = alignment_for(bytes);
  bytes = round_up(bytes, std::min(alignment, kPage));
  const std::lock_guard lock(mutex_);
  if (taken_bytes_ + bytes > limit_bytes_) {
    errno = ENOSPC;
    return nullptr;
  }
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    const auto [begin, size] = *block;
    const auto offset = round_up(begin, alignment);
    if (offset + bytes > begin + size) continue;
    if (!populate(offset, bytes)) return nullptr;
    free_.erase(block);
    if (offset > begin) free_.emplace(begin, offset - begin);
    if (offset + bytes < begin + size) free_.emplace(offset + bytes, begin + size - offset - bytes);
    taken_.emplace(offset, bytes);
    taken_bytes_ += bytes;
    return base() + offset;
  }
  errno = ENOSPC;
  return nullptr;
}

bool Segment::populate(int64_t offset, int64_t bytes) {
  if (bytes >= kHugePage) take_huge_pages(fd_, base(), offset, bytes);
  if (!commit(fd_, offset, bytes)) {
    give_back(fd_, offset, bytes);
    return false;
  }
  if (bytes >= kPage) madvise(base() + offset, bytes, MADV_POPULATE_WRITE);
  return true;
}

void Segment::release(void* memory) {
  if (forks() != forks_) return;  // a forked child drops its copy of a tensor; the pages belong to the parent
  const std::lock_guard lock(mutex_);
  const auto taken = taken_.find(offset_of(memory));
  if (taken == taken_.end()) return;
  auto [offset, bytes] = *taken;
  taken_.erase(taken);
  taken_bytes_ -= bytes;
  if (!keeps_pages_) give_back(fd_, offset, bytes);
  const auto merge_with_next = [&](auto block) {
    const auto next = std::next(block);
    if (next != free_.end() && block->first + block->second == next->first) {
      block->second += next->second;
      free_.erase(next);
    }
  };
  const auto block = free_.emplace(offset, bytes).first;
  merge_with_next(block);
  if (block != free_.begin()) merge_with_next(std::prev(block));
}

void Segment::keep_pages() {
  const std::lock_guard lock(mutex_);
  keeps_pages_ = true;
}

bool Segment::contains(const void* memory, int64_t bytes) const {
  const auto offset = offset_of(memory);
  return offset >= kDataOffset && bytes >= 0 && bytes <= this->bytes() - offset;
}

}  // namespace torchddp::shm
