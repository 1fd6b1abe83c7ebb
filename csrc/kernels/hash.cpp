// Whole blocks go through the active kernel, the rest of a range stripe by stripe.
#include "kernels/hash.h"

#include <algorithm>
#include <cstring>

#include "kernels/kernel_table.h"

namespace torchddp::kernels {
namespace {

void add_stripe(uint64_t* lanes, const unsigned char* stripe, int index) {
  uint64_t words[kHashLanes];
  std::memcpy(words, stripe, sizeof(words));
  for (int lane = 0; lane < kHashLanes; ++lane) {
    const uint64_t keyed = words[lane] ^ kHashKeys[static_cast<size_t>(index + lane)];
    lanes[lane ^ 1] += words[lane];
    lanes[lane] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
  }
}

}  // namespace

uint64_t hash_bytes(const void* data, int64_t bytes) {
  std::array<uint64_t, kHashLanes> lanes;
  std::copy_n(kHashKeys.begin(), lanes.size(), lanes.begin());
  const auto* at = static_cast<const unsigned char*>(data);
  const int64_t blocks = bytes / kHashBlockBytes;
  active_table().hash_blocks(lanes.data(), at, blocks);
  at += blocks * kHashBlockBytes;
  int64_t left = bytes - blocks * kHashBlockBytes;
  for (int index = 0; left > 0; ++index) {
    unsigned char stripe[kHashStripeBytes] = {};  // zeros after the end: the length tells them from data
    const int64_t taken = std::min(left, kHashStripeBytes);
    std::memcpy(stripe, at, static_cast<size_t>(taken));
    add_stripe(lanes.data(), stripe, index);
    at += taken;
    left -= taken;
  }
  uint64_t hash = mix_bits(static_cast<uint64_t>(bytes));
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    hash = mix_bits(hash + mix_bits(lanes[lane] ^ kHashKeys[kHashLanes + lane]));
  }
  return hash;
}

}  // namespace torchddp::kernels
