// Radix selection over the bits of |v|, eleven bits and then twice ten: a histogram of the first over all numbers, then of
// the others over those that share the bits so far with the k-th.
#include "kernels/top_k.h"

#include <algorithm>
#include <array>
#include <memory>

#include "kernels/float_bits.h"

namespace torchddp::kernels {
namespace {

// Magnitudes as integers, in their order. All NaNs have the same key.
constexpr uint32_t kInfinityKey = 0x7F800000u;
constexpr uint32_t kNanKey = kInfinityKey + 1;

constexpr int kFirstShift = 20;
constexpr int kSecondShift = 10;
constexpr uint32_t kDigits = 1u << (31 - kFirstShift);

// Skipping is worth a look at so many numbers at once.
constexpr int64_t kGroup = 32;

TDDP_ALWAYS_INLINE uint32_t key_of(float value) {
  const uint32_t magnitude = bits_as<uint32_t>(value) & 0x7FFFFFFFu;
  return magnitude < kNanKey ? magnitude : kNanKey;
}

using Histogram = std::array<uint32_t, kDigits>;

// What is left of the search: the numbers above the digit in question are all taken, `wanted` more with this digit.
struct Digit {
  uint32_t digit;
  int64_t wanted;
  int64_t count;  // numbers with this digit
};

// Where, counted from the largest digit, the `wanted`-th number is; wanted > 0.
Digit find_digit(const Histogram& histogram, int64_t wanted) {
  uint32_t digit = kDigits - 1;
  while (histogram[digit] < wanted) wanted -= histogram[digit--];
  return {digit, wanted, histogram[digit]};
}

// v, one by one: kept in the residual once it is there.
template <bool kResidual>
struct Values {
  const float* source;
  float* residual;
  float scale;

  TDDP_ALWAYS_INLINE float get(int64_t i) const {
    if constexpr (kResidual) return residual[i];
    return source[i] * scale;
  }

  TDDP_ALWAYS_INLINE uint32_t key(int64_t i) const { return key_of(get(i)); }

  // The largest key of a group.
  TDDP_ALWAYS_INLINE uint32_t largest_key(int64_t begin) const {
    int32_t largest = 0;
    for (int64_t i = begin; i < begin + kGroup; ++i) largest = std::max(largest, static_cast<int32_t>(key(i)));
    return static_cast<uint32_t>(largest);
  }

  void add_residual(int64_t begin, int64_t end) const {
    if constexpr (kResidual) {
      for (int64_t i = begin; i < end; ++i) residual[i] = source[i] * scale + residual[i];
    }
  }
};

// Makes v, and counts first digits. Several histograms, because the same digit often comes twice in a row.
template <bool kResidual>
Histogram count_first_digits(const Values<kResidual>& values, int64_t numel) {
  constexpr int64_t kChunk = 1024;
  constexpr int kCopies = 4;
  std::array<Histogram, kCopies> counts{};
  for (int64_t begin = 0; begin < numel; begin += kChunk) {
    const int64_t end = std::min(numel, begin + kChunk);
    values.add_residual(begin, end);
    int64_t i = begin;
    for (; i + kCopies <= end; i += kCopies) {
      for (int64_t copy = 0; copy < kCopies; ++copy) {
        ++counts[static_cast<size_t>(copy)][values.key(i + copy) >> kFirstShift];
      }
    }
    for (; i < end; ++i) ++counts[0][values.key(i) >> kFirstShift];
  }
  for (size_t digit = 0; digit < kDigits; ++digit) {
    for (size_t copy = 1; copy < kCopies; ++copy) counts[0][digit] += counts[copy][digit];
  }
  return counts[0];
}

Histogram count_digits(const uint32_t* keys, int64_t num_keys, int shift) {
  Histogram histogram{};
  for (int64_t i = 0; i < num_keys; ++i) ++histogram[(keys[i] >> shift) & 0x3FFu];
  return histogram;
}

// Keeps the keys with this digit.
void keep_digit(uint32_t* keys, int64_t num_keys, int shift, uint32_t digit) {
  int64_t kept = 0;
  for (int64_t i = 0; i < num_keys; ++i) {
    const uint32_t key = keys[i];
    keys[kept] = key;
    kept += ((key >> shift) & 0x3FFu) == digit ? 1 : 0;
  }
}

// The key of the k-th number, and how many of that key are taken.
struct Threshold {
  uint32_t key;
  int64_t ties;
};

template <bool kResidual>
Threshold find_threshold(const Values<kResidual>& values, int64_t numel, int64_t k) {
  const Histogram first_digits = count_first_digits(values, numel);
  if (k == 0) return {kNanKey + 1, 0};
  const Digit first = find_digit(first_digits, k);
  // One more than there are: every key is written before it is known whether it stays.
  const auto keys = std::make_unique_for_overwrite<uint32_t[]>(static_cast<size_t>(first.count) + 1);
  int64_t num_keys = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t key = values.key(i);
    keys[static_cast<size_t>(num_keys)] = key;
    num_keys += key >> kFirstShift == first.digit ? 1 : 0;
  }
  const Digit second = find_digit(count_digits(keys.get(), num_keys, kSecondShift), first.wanted);
  keep_digit(keys.get(), num_keys, kSecondShift, second.digit);
  const Digit third = find_digit(count_digits(keys.get(), second.count, 0), second.wanted);
  return {first.digit << kFirstShift | second.digit << kSecondShift | third.digit, third.wanted};
}

template <bool kResidual>
class Selection {
 public:
  Selection(const Values<kResidual>& values, Threshold threshold, int32_t* indices, float* selected)
      : values_(values), threshold_(threshold), indices_(indices), selected_(selected) {}

  void take(int64_t numel) {
    // What is not finite leaves the residual even where it is not taken.
    const uint32_t seen = kResidual ? std::min(threshold_.key, kInfinityKey) : threshold_.key;
    int64_t begin = 0;
    for (; begin + kGroup <= numel; begin += kGroup) {
      if (values_.largest_key(begin) >= seen) take_range(begin, begin + kGroup);
    }
    take_range(begin, numel);
  }

 private:
  void take_range(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float value = values_.get(i);
      const uint32_t key = key_of(value);
      const bool ties = key == threshold_.key && threshold_.ties > 0;
      const bool taken = key > threshold_.key || ties;
      threshold_.ties -= ties ? 1 : 0;
      if constexpr (kResidual) {
        if (taken || key >= kInfinityKey) values_.residual[i] = 0;
      }
      if (!taken) continue;
      *indices_++ = static_cast<int32_t>(i);
      *selected_++ = value;
    }
  }

  Values<kResidual> values_;
  Threshold threshold_;
  int32_t* indices_;
  float* selected_;
};

template <bool kResidual>
void select(const Values<kResidual>& values, int64_t numel, int64_t k, int32_t* indices, float* selected) {
  Selection<kResidual>(values, find_threshold(values, numel, k), indices, selected).take(numel);
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
