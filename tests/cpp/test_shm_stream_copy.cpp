// Copies past the caches: of every length and alignment, and nothing around them.
#include "shm/stream_copy.h"

#include <algorithm>
#include <vector>

#include "check.h"

namespace torchddp::shm {
namespace {

TEST(shm_stream_copy_writes_its_range_and_nothing_else) {
  constexpr std::byte kAround{0xEE};
  std::vector<std::byte> source(400);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7 % 200);
  for (size_t to = 0; to < 66; to += 5) {
    for (size_t from = 0; from < 20; from += 3) {
      for (size_t bytes = 0; bytes < 300; bytes += bytes < 140 ? 1 : 37) {
        std::vector<std::byte> target(400, kAround);
        auto expected = target;
        std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(from), bytes,
                    expected.begin() + static_cast<std::ptrdiff_t>(to));
        stream_copy(target.data() + to, source.data() + from, static_cast<int64_t>(bytes));
        if (target != expected) CHECK_EQ(to * 1'000'000 + from * 1000 + bytes, size_t{0});
      }
    }
  }
  stream_copy(nullptr, nullptr, 0);
  CHECK(true);
}

}  // namespace
}  // namespace torchddp::shm
