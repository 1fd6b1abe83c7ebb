#include "shm/private_view.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <span>

#include "shm/errors.h"
#include "shm/fd.h"

namespace torchddp::shm {
namespace {

// Of an entry in /proc/self/pagemap: see Documentation/admin-guide/mm/pagemap.rst of the kernel.
constexpr uint64_t kOfFile = uint64_t{1} << 61;  // a page of a file, or of shared memory
constexpr uint64_t kSwapped = uint64_t{1} << 62;
constexpr uint64_t kPresent = uint64_t{1} << 63;

bool is_own(uint64_t entry) { return (entry & (kPresent | kSwapped)) != 0 && (entry & kOfFile) == 0; }

}  // namespace

std::vector<PrivateView::Range> PrivateView::changed() const {
  const Fd pagemap(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (!pagemap) {
    throw_unavailable("could not open /proc/self/pagemap");
  }
  const auto page = static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  const auto pages = (bytes() + page - 1) / page;
  const auto first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(base())) / page;
  std::vector<Range> ranges;
  std::array<uint64_t, 4096> entries{};
  for (int64_t at = 0; at < pages;) {
    const auto wanted = std::min<int64_t>(pages - at, static_cast<int64_t>(entries.size()));
    const auto got = pread(pagemap.get(), entries.data(), static_cast<size_t>(wanted) * sizeof(uint64_t),
                           (first + at) * static_cast<int64_t>(sizeof(uint64_t)));
    if (got < static_cast<ssize_t>(sizeof(uint64_t))) {
      throw_unavailable("could not read /proc/self/pagemap");
    }
    const auto known = got / static_cast<ssize_t>(sizeof(uint64_t));
    for (const auto entry : std::span(entries).first(static_cast<size_t>(known))) {
      const auto begin = at++ * page;
      if (!is_own(entry)) {
        continue;
      }
      if (!ranges.empty() && ranges.back().end == begin) {
        ranges.back().end += page;
      } else {
        ranges.push_back({begin, begin + page});
      }
    }
  }
  return ranges;
}

bool PrivateView::drop(Range range) {
  return madvise(base() + range.begin, static_cast<size_t>(range.end - range.begin), MADV_DONTNEED) == 0;
}

}  // namespace torchddp::shm
