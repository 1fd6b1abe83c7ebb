// First finds candidates: a sample gives a magnitude that is almost surely below the k-th, and one pass over memory lists
// everything above. (If that is fewer than k, the pass is repeated and lists everything, so the result is exact whatever the
// sample said.) Then finds the k-th candidate by radix selection over the bits of |v|: eleven, then twice ten.
#include "kernels/top_k.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "kernels/float_bits.h"

namespace torchddp::kernels {
namespace {

// Magnitudes as integers, in their order. All NaNs have the same key.
constexpr uint32_t kInfinityKey = exponent_bits<DType::kF32>();
constexpr uint32_t kNanKey = kInfinityKey + 1;

constexpr int kFirstShift = 20;
constexpr int kSecondShift = 10;
constexpr uint32_t kDigits = 1u << (31 - kFirstShift);

// Numbers checked together: most such groups hold no candidate.
constexpr int64_t kGroup = 32;
// One in this many numbers is sampled, the least is kLeastSample numbers.
constexpr int64_t kSampleShare = 32;
constexpr int64_t kLeastSample = 256;
constexpr int64_t kMostSample = 8192;

TDDP_ALWAYS_INLINE uint32_t magnitude_of(float value) { return bits_as<uint32_t>(value) & 0x7FFFFFFFu; }

TDDP_ALWAYS_INLINE uint32_t key_of(float value) {
  const uint32_t magnitude = magnitude_of(value);
  return magnitude < kNanKey ? magnitude : kNanKey;
}

// v: made from source and residual at first, then in the residual, if there is one.
template <bool kResidual>
struct Values {
  const float* source;
  float* residual;
  float scale;

  TDDP_ALWAYS_INLINE float make(int64_t i) const {
    return kResidual ? source[i] * scale + residual[i] : source[i] * scale;
  }
  TDDP_ALWAYS_INLINE float get(int64_t i) const { return kResidual ? residual[i] : source[i] * scale; }
};

// A key that about k numbers reach, and a few more; before v is in the residual. At most that of infinity, so that whatever is
// not finite is a candidate.
template <bool kResidual>
uint32_t guess_floor(const Values<kResidual>& values, int64_t numel, int64_t k) {
  if (k == 0) return kInfinityKey;
  const int64_t sample = std::min(numel / kSampleShare, kMostSample);
  if (sample < kLeastSample) return 0;
  const double expected = static_cast<double>(k) / static_cast<double>(numel) * static_cast<double>(sample);
  const auto rank = static_cast<int64_t>(expected + 4 * std::sqrt(expected) + 8);
  if (rank >= sample) return 0;
  std::vector<uint32_t> keys;
  keys.reserve(static_cast<size_t>(sample));
  const int64_t step = numel / sample;
  // At another place in each stretch: matrices are periodic.
  for (int64_t i = 0; i < sample; ++i) keys.push_back(key_of(values.make(i * step + i * 7919 % step)));
  std::nth_element(keys.begin(), keys.begin() + rank, keys.end(), std::greater<>());
  return std::min(keys[static_cast<size_t>(rank)], kInfinityKey);
}

// Indices of the numbers whose keys reach `floor` <= kInfinityKey, ascending. kMake: v is made, and put into the residual.
template <bool kMake, bool kResidual>
std::vector<int32_t> find_candidates(const Values<kResidual>& values, int64_t numel, uint32_t floor) {
  std::vector<int32_t> indices;
  size_t count = 0;
  for (int64_t begin = 0; begin < numel; begin += kGroup) {
    const int64_t size = std::min(kGroup, numel - begin);
    float group[kGroup];
    const auto look = [&](int64_t size) {
      int32_t found = 0;
      for (int64_t i = 0; i < size; ++i) {
        group[i] = kMake ? values.make(begin + i) : values.get(begin + i);
        if constexpr (kMake && kResidual) values.residual[begin + i] = group[i];
        found |= static_cast<int32_t>(magnitude_of(group[i])) >= static_cast<int32_t>(floor) ? 1 : 0;
      }
      return found != 0;
    };
    if (!(size == kGroup ? look(kGroup) : look(size))) continue;
    if (indices.size() < count + kGroup) indices.resize(2 * indices.size() + kGroup);
    for (int64_t i = 0; i < size; ++i) {
      indices[count] = static_cast<int32_t>(begin + i);
      count += magnitude_of(group[i]) >= floor ? 1 : 0;
    }
  }
  indices.resize(count);
  return indices;
}

// Where, counted from the largest digit, the `wanted`-th number is, and which of its digit it is.
struct Digit {
  uint32_t digit;
  int64_t wanted;
};

// Of the bits from `shift` on, `mask` of them; 0 < wanted <= number of keys.
Digit find_digit(const std::vector<uint32_t>& keys, int shift, uint32_t mask, int64_t wanted) {
  std::array<uint32_t, kDigits> histogram{};
  for (const uint32_t key : keys) ++histogram[(key >> shift) & mask];
  uint32_t digit = mask;
  while (histogram[digit] < wanted) wanted -= histogram[digit--];
  return {digit, wanted};
}

// The key of the k-th number, and how many of that key are taken.
struct Threshold {
  uint32_t key;
  int64_t ties;
};

// `keys` are at least k, in any order.
Threshold find_threshold(std::vector<uint32_t> keys, int64_t k) {
  if (k == 0) return {kNanKey + 1, 0};
  Threshold threshold{0, k};
  uint32_t mask = kDigits - 1;
  for (const int shift : {kFirstShift, kSecondShift, 0}) {
    const Digit found = find_digit(keys, shift, mask, threshold.ties);
    threshold = {threshold.key | found.digit << shift, found.wanted};
    std::erase_if(keys, [&](uint32_t key) { return key >> shift != threshold.key >> shift; });
    mask = (1u << kSecondShift) - 1;
  }
  return threshold;
}

template <bool kResidual>
void select(const Values<kResidual>& values, int64_t numel, int64_t k, int32_t* indices, float* selected) {
  const uint32_t floor = guess_floor(values, numel, k);
  std::vector<int32_t> candidates = find_candidates<true>(values, numel, floor);
  if (static_cast<int64_t>(candidates.size()) < k) candidates = find_candidates<false>(values, numel, 0);

  std::vector<uint32_t> keys;
  keys.reserve(candidates.size());
  for (const int32_t candidate : candidates) keys.push_back(key_of(values.get(candidate)));
  Threshold threshold = find_threshold(std::move(keys), k);

  for (const int32_t candidate : candidates) {
    const float value = values.get(candidate);
    const uint32_t key = key_of(value);
    const bool ties = key == threshold.key && threshold.ties > 0;
    const bool taken = key > threshold.key || ties;
    threshold.ties -= ties ? 1 : 0;
    // What is not finite leaves the residual even where it is not taken.
    if constexpr (kResidual) {
      if (taken || key >= kInfinityKey) values.residual[candidate] = 0;
    }
    if (!taken) continue;
    *indices++ = candidate;
    *selected++ = value;
  }
}

}  // namespace

void select_top_k(const float* source, int64_t numel, int64_t k, int32_t* indices, float* values, float* residual,
                  float scale) {
  if (residual != nullptr) {
    select(Values<true>{source, residual, scale}, numel, k, indices, values);
  } else {
    select(Values<false>{source, nullptr, scale}, numel, k, indices, values);
  }
}

}  // namespace torchddp::kernels
