// A plan as words and back: [version, num_buckets, then per bucket its number of slots and their parameter indices].
#include <algorithm>

#include "plan/bucket_plan.h"
#include "plan/plan_detail.h"

namespace torchddp::plan {
namespace {

constexpr int64_t kVersion = 1;
constexpr int64_t kHeaderWords = 2;

// Reads words in turn; a read past the end is an error, not undefined.
class Reader {
 public:
  explicit Reader(std::span<const int64_t> words) : words_(words) {}

  int64_t next(const char* what) {
    if (at_ == words_.size()) detail::fail("encoded plan: ends before ", what);
    return words_[at_++];
  }

  int64_t next_between(const char* what, int64_t lowest, int64_t highest) {
    const int64_t value = next(what);
    if (value < lowest || value > highest) {
      detail::fail("encoded plan: ", what, " is ", value, ", allowed is ", lowest, " to ", highest);
    }
    return value;
  }

  std::span<const int64_t> rest() const { return words_.subspan(at_); }

 private:
  std::span<const int64_t> words_;
  size_t at_ = 0;
};

// The parameter indices of each bucket; each index in range and met once, or else offsets might overflow.
std::vector<std::vector<int64_t>> read_indices(std::span<const int64_t> words, int64_t num_params) {
  Reader reader(words);
  reader.next_between("version", kVersion, kVersion);
  std::vector<std::vector<int64_t>> buckets(
      static_cast<size_t>(reader.next_between("number of buckets", 0, num_params)));
  std::vector<int64_t> all;
  for (std::vector<int64_t>& bucket : buckets) {
    bucket.resize(static_cast<size_t>(reader.next_between("number of slots", 1, num_params)));
    for (int64_t& param : bucket) param = reader.next_between("parameter index", 0, num_params - 1);
    all.insert(all.end(), bucket.begin(), bucket.end());
  }
  detail::check_distinct(all, num_params, "encoded plan: parameter index");
  for (const int64_t word : reader.rest()) {
    if (word != 0) detail::fail("encoded plan: unused word is ", word, ", expected 0");
  }
  return buckets;
}

}  // namespace

int64_t encoded_size(int64_t num_params) {
  if (num_params < 0) detail::fail("num_params must be at least 0, got ", num_params);
  return kHeaderWords + 2 * num_params;  // at worst one bucket per parameter: its number of slots and one index
}

std::vector<int64_t> encode_plan(const BucketPlan& plan, int64_t num_params) {
  const int64_t num_words = encoded_size(num_params);
  std::vector<int64_t> words = {kVersion, std::ssize(plan.buckets)};
  words.reserve(static_cast<size_t>(num_words));
  std::vector<int64_t> indices;
  for (size_t i = 0; i < plan.buckets.size(); ++i) {
    const BucketSpec& bucket = plan.buckets[i];
    if (bucket.slots.empty()) detail::fail("bucket ", i, " has no slots");
    words.push_back(std::ssize(bucket.slots));
    for (const Slot& slot : bucket.slots) {
      words.push_back(slot.param);
      indices.push_back(slot.param);
    }
  }
  if (std::ssize(indices) != num_params) {
    detail::fail("the plan has ", indices.size(), " slots for ", num_params, " parameters");
  }
  detail::check_distinct(indices, num_params, "slots of the plan");
  words.resize(static_cast<size_t>(num_words), 0);
  return words;
}

BucketPlan decode_plan(std::span<const int64_t> words, std::span<const ParamSpec> params, int64_t alignment_bytes) {
  detail::check_params(params, alignment_bytes);
  const int64_t num_params = std::ssize(params);
  if (std::ssize(words) != encoded_size(num_params)) {
    detail::fail("encoded plan: ", words.size(), " words, expected ", encoded_size(num_params), " for ", num_params,
                 " parameters");
  }
  BucketPlan plan;
  for (const std::vector<int64_t>& indices : read_indices(words, num_params)) {
    BucketSpec& bucket = plan.buckets.emplace_back(detail::make_bucket(params[static_cast<size_t>(indices.front())]));
    for (const int64_t param : indices) {
      detail::append_slot(bucket, params[static_cast<size_t>(param)], param, alignment_bytes);
    }
  }
  check_plan(plan, params, alignment_bytes);
  return plan;
}

}  // namespace torchddp::plan
