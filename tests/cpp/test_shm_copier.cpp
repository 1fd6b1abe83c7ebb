// Copies to shared memory: every length and alignment without writing outside, and the choice of a method.
#include "shm/copier.h"

#include <algorithm>
#include <atomic>
#include <thread>
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

TEST(shm_copier_copies_in_both_ways) {
  Copier copier;
  std::vector<std::byte> source(300'000);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7 % 251);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 2; ++thread) {
    threads.emplace_back([&] {
      std::vector<std::byte> target(source.size());
      for (const size_t bytes : {0, 1, 4095, 4096, 4099, 70'001, 300'000}) {
        for (int turn = 0; turn < 12; ++turn) {  // after six copies by one method the other is tried
          std::fill(target.begin(), target.end(), std::byte{0});
          copier.copy(target.data(), source.data(), static_cast<int64_t>(bytes));
          const auto end = source.begin() + static_cast<std::ptrdiff_t>(bytes);
          wrong += std::equal(source.begin(), end, target.begin()) ? 0 : 1;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
}

// How often each method was used in this many turns.
struct Taken {
  int first = 0, second = 0;
};

template <class Cost>
Taken take(Quicker& quicker, int turns, Cost&& cost) {
  Taken taken;
  for (int turn = 0; turn < turns; ++turn) {
    const auto choice = quicker.choice();
    (choice == 0 ? taken.first : taken.second) += 1;
    quicker.took(choice, cost(choice, turn));
  }
  return taken;
}

TEST(shm_quicker_finds_the_quicker_way_and_rarely_tries_the_other) {
  for (const int better : {0, 1}) {
    Quicker quicker;
    const auto cost = [&](int choice, int /*turn*/) { return choice == better ? 1.0 : 10.0; };
    take(quicker, 10, cost);
    const auto early = take(quicker, 200, cost);
    const auto late = take(quicker, 10'000, cost);
    const auto wrong = [&](const Taken& taken) { return better == 0 ? taken.second : taken.first; };
    CHECK(wrong(early) <= 20);
    CHECK(wrong(late) >= 6 && wrong(late) <= 60);
    CHECK_EQ(quicker.choice(), better);
  }
}

TEST(shm_quicker_notices_that_the_better_way_has_become_slow) {
  Quicker quicker;
  take(quicker, 5000, [](int choice, int /*turn*/) { return choice == 1 ? 1.0 : 3.0; });
  CHECK_EQ(quicker.choice(), 1);
  const auto after = take(quicker, 50, [](int choice, int /*turn*/) { return choice == 1 ? 10.0 : 3.0; });
  CHECK(after.second <= 20);
}

TEST(shm_quicker_stays_where_both_are_alike_or_single_turns_are_slow) {
  Quicker quicker;
  const auto taken = take(
      quicker, 5000, [](int choice, int turn) { return (choice == 0 ? 1.0 : 1.05) * (turn % 7 == 0 ? 50.0 : 1.0); });
  CHECK_EQ(quicker.choice(), 0);
  CHECK(taken.second < 100);
}

}  // namespace
}  // namespace torchddp::shm
