// The hash: instruction sets, lengths and alignments against a scalar loop, and changes that must change it.
#include <cstring>
#include <set>
#include <stdexcept>
#include <utility>

#include "capabilities.h"
#include "check.h"
#include "kernels/hash.h"
#include "pack_reference.h"

namespace torchddp::kernels {
namespace {

using reference::Bytes;
using reference::random_bytes;

// Sizes around a word, a stripe, a block and several blocks.
constexpr int64_t kSizes[] = {0, 1, 7, 8, 9, 63, 64, 65, 127, 1000, 1023, 1024, 1025, 2048, 3000, 5003, 70001};

uint64_t hash_of(const Bytes& data) { return hash_bytes(data.data(), static_cast<int64_t>(data.size())); }

// The definition, word by word.
uint64_t plain_hash(Bytes data) {
  const uint64_t bytes = data.size();
  data.resize((data.size() + 63) / 64 * 64);
  uint64_t lanes[8];
  for (size_t lane = 0; lane < 8; ++lane) lanes[lane] = kHashKeys[lane];
  for (size_t at = 0; at < data.size(); at += 64) {
    const size_t stripe = at / 64 % 16;
    for (size_t lane = 0; lane < 8; ++lane) {
      uint64_t word;
      std::memcpy(&word, data.data() + at + lane * 8, 8);
      const uint64_t keyed = word ^ kHashKeys[stripe + lane];
      lanes[lane ^ 1] += word;
      lanes[lane] += static_cast<uint64_t>(static_cast<uint32_t>(keyed)) * static_cast<uint32_t>(keyed >> 32);
    }
    if (stripe == 15 && at + 64 <= bytes / 1024 * 1024) {
      for (size_t lane = 0; lane < 8; ++lane) {
        lanes[lane] = (lanes[lane] ^ (lanes[lane] >> 47) ^ kHashKeys[16 + lane]) * kHashPrime;
      }
    }
  }
  uint64_t hash = mix_bits(bytes);
  for (size_t lane = 0; lane < 8; ++lane) hash = mix_bits(hash + mix_bits(lanes[lane] ^ kHashKeys[8 + lane]));
  return hash;
}

TEST(hash_is_the_same_on_every_instruction_set_and_alignment) {
  for (const int64_t size : kSizes) {
    const Bytes data = random_bytes(size, static_cast<uint32_t>(size));
    const uint64_t expected = plain_hash(data);
    for_each_capability([&] {
      for (const size_t misalignment : {0u, 1u, 2u, 6u, 12u, 33u}) {
        CHECK_EQ(hash_bytes(reference::shifted_by(data, misalignment).data() + misalignment, size), expected);
      }
    });
  }
}

TEST(every_flipped_bit_changes_the_hash) {
  Bytes data = random_bytes(2200, 2);
  const uint64_t before = hash_of(data);
  std::set<uint64_t> seen{before};
  for (size_t bit = 0; bit < data.size() * 8; ++bit) {
    data[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
    seen.insert(hash_of(data));
    data[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
  }
  CHECK_EQ(seen.size(), data.size() * 8 + 1);
}

TEST(swapped_words_change_the_hash) {
  Bytes data = random_bytes(4096, 3);
  auto* const words = reinterpret_cast<uint32_t*>(data.data());
  const uint64_t before = hash_of(data);
  std::set<uint64_t> seen{before};
  size_t swaps = 0;
  for (size_t a = 0; a < 1024; a += 5) {
    // Neighbors, the other half of a word, and the same lane of the next stripe, a later stripe and the next block.
    for (const size_t distance : {1u, 2u, 16u, 48u, 256u, 512u}) {
      if (a + distance >= 1024) continue;
      std::swap(words[a], words[a + distance]);
      seen.insert(hash_of(data));
      std::swap(words[a], words[a + distance]);
      ++swaps;
    }
  }
  CHECK_EQ(seen.size(), swaps + 1);
}

TEST(lengths_of_zeros_differ) {
  std::set<uint64_t> seen;
  for (int64_t size = 0; size < 3000; ++size) seen.insert(hash_of(Bytes(static_cast<size_t>(size))));
  CHECK_EQ(seen.size(), 3000u);
}

}  // namespace
}  // namespace torchddp::kernels
