// A segment's memory: placement of blocks, what is freed, and what is impossible.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include "shm/errors.h"
#include "shm_ranks.h"

namespace torchddp::shm {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHuge = 2 << 20;

// Simulates, during its lifetime, a kernel before 6.10, in which a signal undoes everything that a call of fallocate() has allocated,
// and a profiler that sends a signal every so many bytes.
struct OldKernel {
  explicit OldKernel(int64_t bytes_between_signals, int64_t room = INT64_MAX) {
    between = bytes_between_signals;
    left = room;
    num_interrupted = 0;
  }
  ~OldKernel() { between = left = INT64_MAX; }
  OldKernel(const OldKernel&) = delete;
  OldKernel& operator=(const OldKernel&) = delete;

  static inline int64_t between = INT64_MAX;
  static inline int64_t left = INT64_MAX;  // bytes available
  static inline int num_interrupted = 0;

  // Such a kernel's result: an error, or 0 to continue.
  static int fate(int64_t bytes) {
    if (bytes > between) return ++num_interrupted < 1000 ? EINTR : EIO;  // fail rather than loop forever
    return left != INT64_MAX && (left -= bytes) < 0 ? ENOSPC : 0;
  }
};

int64_t pages_held(const Segment& segment) {
  struct stat info{};
  fstat(segment.fd(), &info);
  return info.st_blocks * 512 / kPage;
}

void fill(void* memory, int64_t bytes, int value) { std::memset(memory, value, static_cast<size_t>(bytes)); }

bool is_filled(const void* memory, int64_t bytes, int value) {
  const auto* data = static_cast<const unsigned char*>(memory);
  return std::all_of(data, data + bytes, [&](unsigned char byte) { return byte == value; });
}

TEST(shm_segment_blocks_are_aligned_to_their_size) {
  Segment segment(0, 1, 0);
  const std::pair<int64_t, int64_t> cases[] = {{0, 64},
                                               {1, 64},
                                               {64, 64},
                                               {65, 64},
                                               {4000, 64},
                                               {4096, kPage},
                                               {4097, kPage},
                                               {100'000, kPage},
                                               {kHuge - 1, kHuge},
                                               {kHuge, kHuge},
                                               {3 * kHuge + 1, kHuge}};
  for (const auto& [bytes, alignment] : cases) {
    auto* block = segment.allocate(bytes);
    CHECK(block != nullptr);
    CHECK_EQ(segment.offset_of(block) % alignment, 0);
    CHECK(segment.offset_of(block) >= kDataOffset);
    CHECK(segment.contains(block, bytes));
    fill(block, bytes, 1);
  }
}

TEST(shm_segment_released_memory_is_merged_and_used_again) {
  Segment segment(0, 1, 0);
  for (const auto& order : {std::array{0, 1, 2}, std::array{2, 1, 0}, std::array{0, 2, 1}, std::array{1, 0, 2}}) {
    std::array<void*, 3> blocks{};
    for (auto& block : blocks) block = segment.allocate(3 * kPage);
    CHECK_EQ(segment.offset_of(blocks[1]) - segment.offset_of(blocks[0]), 3 * kPage);
    auto* after = segment.allocate(kPage);
    for (const int which : order) segment.release(blocks[static_cast<size_t>(which)]);
    auto* whole = segment.allocate(9 * kPage);
    CHECK(whole == blocks[0]);
    segment.release(whole);
    segment.release(after);
  }
  segment.release(nullptr);
  int elsewhere = 0;
  segment.release(&elsewhere);
  auto* block = segment.allocate(100);
  segment.release(static_cast<std::byte*>(block) + 64);  // not the start of a block
  segment.release(block);
  segment.release(block);
  CHECK(segment.allocate(100) == block);
}

TEST(shm_segment_without_room_says_so) {
  Segment segment(0, 1, 10 * kPage);
  auto* most = segment.allocate(9 * kPage);
  CHECK(most != nullptr);
  for (const int64_t bytes : {kPage + 1, 2 * kPage, int64_t{1} << 40, INT64_MAX - 100, INT64_MAX}) {
    errno = 0;
    CHECK(segment.allocate(bytes) == nullptr);
    CHECK_EQ(errno, ENOSPC);
  }
  auto* rest = segment.allocate(kPage);
  CHECK(rest != nullptr);
  CHECK(segment.allocate(1) == nullptr);
  segment.release(rest);
  CHECK(segment.allocate(1) != nullptr);
  Segment unlimited(0, 1, 0);
  errno = 0;
  CHECK(unlimited.allocate(unlimited.bytes()) == nullptr);
  CHECK_EQ(errno, ENOSPC);
}

TEST(shm_segment_contains_what_can_be_allocated_and_no_more) {
  const Segment segment(0, 1, 0);
  const int64_t all = segment.bytes(), room = all - kDataOffset;
  const std::pair<int64_t, int64_t> inside[] = {{kDataOffset, 1}, {kDataOffset, room}, {all - 1, 1}, {all, 0}};
  const std::pair<int64_t, int64_t> outside[] = {{0, 1},   {kDataOffset - 1, 1}, {kDataOffset, room + 1}, {all - 1, 2},
                                                 {all, 1}, {kDataOffset, -1},    {kDataOffset, INT64_MAX}};
  for (const auto& [offset, bytes] : inside) CHECK(segment.contains(segment.base() + offset, bytes));
  for (const auto& [offset, bytes] : outside) CHECK(!segment.contains(segment.base() + offset, bytes));
  const int elsewhere = 0;
  CHECK(!segment.contains(&elsewhere, 4));
  CHECK(!segment.contains(nullptr, 0));
}

TEST(shm_segment_pages_are_there_from_allocation_to_release) {
  Segment segment(0, 1, 0);
  const auto at_first = pages_held(segment);
  CHECK(at_first * kPage < kDataOffset + kHuge);
  auto* block = segment.allocate(100 * kPage);
  CHECK(pages_held(segment) >= at_first + 100);  // before it is written
  fill(block, 100 * kPage, 7);
  auto* small = segment.allocate(64);
  fill(small, 64, 9);
  segment.release(block);
  CHECK(pages_held(segment) <= at_first + 1);
  CHECK(is_filled(small, 64, 9));
  segment.release(small);
  CHECK(segment.allocate(100 * kPage) != nullptr);
}

// Of our own mapping, by the kernel's list.
int64_t huge_bytes(const Segment& segment) {
  std::ifstream maps("/proc/self/smaps");
  bool is_ours = false;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name.back() != ':') {  // "begin-end ..." of the next mapping
      is_ours = std::strtoull(name.c_str(), nullptr, 16) == reinterpret_cast<uintptr_t>(segment.base());
    } else if (int64_t kib = 0; is_ours && name == "ShmemPmdMapped:" && words >> kib) {
      return kib * 1024;
    }
  }
  return 0;
}

TEST(shm_segment_uses_huge_pages_for_large_blocks_alone) {
  Segment segment(0, 1, 0);
  const Mapping of_peer(segment.fd(), segment.bytes());
  for (const auto* base : {segment.base(), of_peer.base()}) {
    CHECK_EQ(reinterpret_cast<uintptr_t>(base) % kHuge, 0u);
  }
  CHECK_EQ(segment.taken_bytes(), 0);
  CHECK_EQ(huge_bytes(segment), 0);
  auto* block = segment.allocate(4 * kHuge + kPage);
  auto* small = segment.allocate(100 * kPage);
  CHECK_EQ(segment.taken_bytes(), 4 * kHuge + 101 * kPage);
  const auto huge = huge_bytes(segment);
  CHECK(huge <= 4 * kHuge && huge % kHuge == 0);  // the kernel may have none
  fill(block, 4 * kHuge + kPage, 3);
  CHECK(is_filled(of_peer.base() + segment.offset_of(block), 4 * kHuge + kPage, 3));
  segment.release(block);
  CHECK_EQ(segment.taken_bytes(), 100 * kPage);
  CHECK_EQ(huge_bytes(segment), 0);
  segment.release(small);
}

// Does the same manually for separate memory.
bool has_huge_pages() {
  const Fd file(memfd_create("probe", MFD_CLOEXEC));
  if (ftruncate(file.get(), 2 * kHuge) != 0) return false;
  const Mapping mapping(file.get(), 2 * kHuge);
  *mapping.base() = std::byte{1};
  constexpr int kCollapse = 25;
  return madvise(mapping.base(), kHuge, kCollapse) == 0;
}

TEST(shm_segment_gets_huge_pages_where_the_kernel_has_them) {
  Segment segment(0, 1, 0);
  segment.allocate(8 * kHuge);
  const bool has_all = huge_bytes(segment) == 8 * kHuge;
  CHECK(has_all || !has_huge_pages());
}

TEST(shm_segment_can_not_be_resized_or_unsealed_and_is_closed_on_exec) {
  Segment segment(0, 1, 0);
  CHECK_EQ(ftruncate(segment.fd(), 0), -1);
  CHECK_EQ(ftruncate(segment.fd(), segment.bytes() + kPage), -1);
  CHECK_EQ(fcntl(segment.fd(), F_ADD_SEALS, F_SEAL_WRITE), -1);
  CHECK((fcntl(segment.fd(), F_GETFD) & FD_CLOEXEC) != 0);
  const auto* header = reinterpret_cast<const Header*>(segment.base());
  CHECK_EQ(header->segment_bytes, segment.bytes());
  CHECK_EQ(header->magic, kMagic);
}

TEST(shm_segment_is_the_same_memory_in_another_mapping) {
  Segment segment(0, 1, 0);
  const Mapping mapping(segment.fd(), segment.bytes());
  auto* block = segment.allocate(10'000);
  fill(block, 10'000, 5);
  CHECK(mapping.base() != segment.base());
  CHECK(is_filled(mapping.base() + segment.offset_of(block), 10'000, 5));
  CHECK_THROWS(Unavailable, Mapping(-1, 4096), "could not map 4096 bytes");
}

// Each rank maps all ranks' segments.
TEST(shm_segments_of_many_ranks_fit_in_the_address_space) {
  const auto machine = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  for (const int size : {1, 2, 4, 5, 8, 128, kMaxRanks}) {
    const Segment segment(0, size, 0);
    CHECK(segment.bytes() <= machine && segment.bytes() * size <= 4 * machine);
    CHECK(segment.bytes() >= std::min(machine, 4 * (machine / size)) - kHuge);
    CHECK_EQ(reinterpret_cast<const Header*>(segment.base())->segment_bytes, segment.bytes());
    CHECK_EQ(reinterpret_cast<const Header*>(segment.base())->size, size);
  }
}

// Neither shared memory nor its holes, which the kernel would fill with zeros to dump them.
TEST(shm_segments_are_not_in_core_dumps) {
  Segment segment(0, 1, 0);
  const Mapping of_peer(segment.fd(), segment.bytes());
  segment.release(segment.allocate(10 * kPage));  // a hole
  std::ifstream maps("/proc/self/smaps");
  int num_seen = 0;
  bool is_ours = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:torchddp") != std::string::npos) {
      is_ours = true;
    } else if (is_ours && line.starts_with("VmFlags:")) {
      CHECK(line.find(" dd") != std::string::npos);
      ++num_seen;
      is_ours = false;
    }
  }
  CHECK(num_seen >= 2);
}

TEST(shm_segment_allocates_while_signals_come) {
  constexpr int64_t kBytes = (8 << 20) + 5 * kPage;
  for (const int64_t between_signals : {kPage, 3 * kPage, kBytes - 1, kBytes}) {
    Segment segment(0, 1, 0);
    const auto before = pages_held(segment);
    const OldKernel kernel(between_signals);
    auto* block = segment.allocate(kBytes);
    CHECK(block != nullptr);
    CHECK(pages_held(segment) >= before + kBytes / kPage);
    CHECK_EQ(OldKernel::num_interrupted == 0, between_signals == kBytes);
  }
}

// What did not fit is freed, and its neighbors are kept.
TEST(shm_segment_that_runs_out_of_room_between_signals_gives_back_what_it_got) {
  Segment segment(0, 1, 0);
  auto* small = segment.allocate(64);
  fill(small, 64, 9);
  const auto before = pages_held(segment);
  {
    const OldKernel kernel(16 * kPage, 100 * kPage);
    CHECK(segment.allocate(300 * kPage) == nullptr);
    CHECK_EQ(errno, ENOSPC);
  }
  CHECK(OldKernel::num_interrupted > 0);
  CHECK(pages_held(segment) <= before + 1);
  CHECK(is_filled(small, 64, 9));
  CHECK(segment.allocate(300 * kPage) != nullptr);
}

TEST(shm_segment_that_runs_out_of_room_gives_back_huge_pages_too) {
  Segment segment(0, 1, 0);
  const auto before = pages_held(segment);
  {
    const OldKernel kernel(INT64_MAX, 100 * kPage);
    CHECK(segment.allocate(4 * kHuge) == nullptr);
    CHECK_EQ(errno, ENOSPC);
  }
  CHECK_EQ(pages_held(segment), before);
  CHECK(segment.allocate(4 * kHuge) != nullptr);
}

// Compared with a list of blocks: none overlap, contents are kept, and at the end all is free.
TEST(shm_segment_random_allocations_agree_with_a_model) {
  constexpr int64_t kLimit = 24 << 20;
  Segment segment(0, 1, kLimit);
  struct Block {
    int64_t bytes;
    int value;
  };
  std::map<int64_t, Block> model;
  std::mt19937 random(7);
  const auto at_first = pages_held(segment);
  int num_refused = 0;
  const auto drop = [&](std::map<int64_t, Block>::iterator found) {
    auto* memory = segment.base() + found->first;
    CHECK(is_filled(memory, found->second.bytes, found->second.value));
    segment.release(memory);
    model.erase(found);
  };
  for (int step = 0; step < 1500; ++step) {
    if (!model.empty() && random() % 5 < 2) {
      drop(std::next(model.begin(), static_cast<std::ptrdiff_t>(random() % model.size())));
      continue;
    }
    constexpr int64_t kSizes[] = {1, 64, 1000, kPage - 64, kPage, 3 * kPage + 5, 100'000, kHuge, kHuge + 1};
    const Block block{kSizes[random() % 9] + static_cast<int64_t>(random() % 3), static_cast<int>(1 + random() % 250)};
    auto* memory = segment.allocate(block.bytes);
    if (memory == nullptr) {
      ++num_refused;
      CHECK(!model.empty());
      drop(model.begin());
      continue;
    }
    const auto offset = segment.offset_of(memory);
    const auto next = model.lower_bound(offset);
    CHECK(next == model.end() || offset + block.bytes <= next->first);
    CHECK(next == model.begin() || std::prev(next)->first + std::prev(next)->second.bytes <= offset);
    fill(memory, block.bytes, block.value);
    model.emplace(offset, block);
  }
  CHECK(num_refused > 0);
  while (!model.empty()) drop(model.begin());
  auto* whole = segment.allocate(kLimit);
  CHECK(whole != nullptr);
  segment.release(whole);
  CHECK(pages_held(segment) < at_first + 600);  // only what small blocks have written
}

TEST(shm_segment_threads_allocate_at_the_same_time) {
  Segment segment(0, 1, 0);
  check_ranks(4, [&](int thread) {
    std::mt19937 random(static_cast<uint32_t>(thread));
    for (int i = 0; i < 200; ++i) {
      const int64_t bytes = 1 + random() % 20'000;
      auto* block = segment.allocate(bytes);
      require(block != nullptr, "no room");
      fill(block, bytes, thread + 1);
      require(is_filled(block, bytes, thread + 1), "somebody else has the same memory");
      segment.release(block);
    }
  });
}

#ifndef __SANITIZE_THREAD__  // it doesn't support fork()

// Whether `body` returns true in a child process.
template <class Body>
bool in_child(const Body& body) {
  return Process([&] { return body() ? 0 : 1; }).end() == 0;
}

bool limit_files_to(int64_t bytes) {
  const rlimit limit{static_cast<rlim_t>(bytes), static_cast<rlim_t>(bytes)};
  return setrlimit(RLIMIT_FSIZE, &limit) == 0;
}

TEST(shm_segment_keeps_below_the_limit_on_file_sizes) {
  CHECK(in_child([] {
    if (!limit_files_to(64 << 20)) return false;
    Segment segment(0, 1, 0);
    auto* block = segment.allocate(16 << 20);
    if (segment.bytes() > 64 << 20 || block == nullptr) return false;
    fill(block, 16 << 20, 1);
    return segment.allocate(60 << 20) == nullptr;
  }));
  CHECK(in_child([] {
    return limit_files_to(1 << 20) &&
           has(testing::thrown_by<Unavailable>([] { const Segment segment(0, 1, 0); }), {"ulimit -f"});
  }));
}

// Minor page faults of this process so far. ThreadSanitizer causes many of its own.
int64_t faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

// AddressSanitizer reads one shadow byte for every eight bytes, from a page that may not be mapped yet.
#ifdef __SANITIZE_ADDRESS__
constexpr int64_t kBytesPerShadowByte = 8;
#else
constexpr int64_t kBytesPerShadowByte = INT64_MAX;
#endif

TEST(shm_segment_pages_are_mapped_before_they_are_touched) {
  Segment segment(0, 1, 0);
  for (const int64_t bytes : {1000 * kPage, 3 * kHuge + kPage}) {
    auto* block = segment.allocate(bytes);
    const auto before = faults();
    fill(block, bytes, 1);
    CHECK(faults() - before < 100 + bytes / kBytesPerShadowByte / kPage);
    segment.release(block);
  }
}

// A child that frees its copies of tensors must not clear the parent's, nor allocate the same memory.
TEST(shm_segment_is_left_alone_by_a_forked_child) {
  Segment segment(0, 1, 0);
  auto* block = segment.allocate(10 * kPage);
  fill(block, 10 * kPage, 3);
  CHECK(in_child([&] {
    segment.release(block);
    return segment.allocate(64) == nullptr && errno == ENOSPC;
  }));
  CHECK(is_filled(block, 10 * kPage, 3));
}

TEST(shm_segment_an_engine_is_not_closed_by_a_forked_child) {
  Host host(1);
  auto engine = host.engine(0);
  CHECK(in_child([&] {
    engine.reset();
    return true;
  }));
  CHECK_EQ(host.header(0).state.load(), static_cast<uint32_t>(RankState::kOpen));
  engine.reset();
  CHECK_EQ(host.header(0).state.load(), static_cast<uint32_t>(RankState::kClosed));
}

#endif

}  // namespace
}  // namespace torchddp::shm

// Replaces the C library's.
extern "C" int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  if (mode == 0) {
    if (const int error = torchddp::shm::OldKernel::fate(bytes)) {
      errno = error;
      return -1;
    }
  }
  return static_cast<int>(syscall(SYS_fallocate, fd, mode, offset, bytes));
}
