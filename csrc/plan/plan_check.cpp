#include <algorithm>

#include "plan/bucket_plan.h"
#include "plan/plan_detail.h"

namespace torchddp::plan {
namespace {

using detail::describe;
using detail::fail;

class PlanChecker {
 public:
  PlanChecker(std::span<const ParamSpec> params, int64_t alignment_bytes)
      : params_(params), alignment_bytes_(alignment_bytes), bucket_of_(params.size(), kNone) {}

  void bucket(const BucketSpec& bucket, int64_t index) {
    if (bucket.slots.empty()) fail("bucket ", index, " has no slots");
    for (const Slot& slot : bucket.slots) {
      claim(slot.param, index);
      kind(bucket, slot, index);
      place(bucket, slot, index);
    }
    if (bucket.sparse) {
      sparse(bucket, index);
    } else {
      overlap(bucket, index);
    }
  }

  void all_claimed() const {
    for (int64_t param = 0; param < std::ssize(params_); ++param) {
      if (bucket_of_[static_cast<size_t>(param)] == kNone) fail(describe(params_, param), " is in no bucket");
    }
  }

 private:
  static constexpr int64_t kNone = -1;

  void claim(int64_t param, int64_t index) {
    if (param < 0 || param >= std::ssize(params_)) {
      fail("bucket ", index, " holds parameter index ", param, ": allowed are 0 to ", std::ssize(params_) - 1);
    }
    int64_t& owner = bucket_of_[static_cast<size_t>(param)];
    if (owner != kNone) fail(describe(params_, param), " is in bucket ", owner, " and again in bucket ", index);
    owner = index;
  }

  void kind(const BucketSpec& bucket, const Slot& slot, int64_t index) const {
    const ParamSpec& spec = params_[static_cast<size_t>(slot.param)];
    const auto expect = [&](const char* what, int64_t of_param, int64_t of_bucket) {
      if (of_param == of_bucket) return;
      fail(describe(params_, slot.param), " has ", what, " ", of_param, " in bucket ", index, " of ", what, " ",
           of_bucket);
    };
    expect("dtype", spec.dtype, bucket.dtype);
    expect("device", spec.device, bucket.device);
    expect("itemsize", spec.itemsize, bucket.itemsize);
    expect("sparse", spec.sparse, bucket.sparse);
    expect("owner", spec.owner, bucket.owner);
    if (slot.numel != spec.numel) {
      fail(describe(params_, slot.param), " has ", spec.numel, " elements, its slot in bucket ", index, " has ",
           slot.numel);
    }
  }

  void place(const BucketSpec& bucket, const Slot& slot, int64_t index) const {
    const int64_t step = detail::alignment_numel(bucket.itemsize, alignment_bytes_);
    if (slot.offset < 0 || slot.offset % step != 0) {
      fail(describe(params_, slot.param), " starts at element ", slot.offset, " of bucket ", index,
           ": allowed are multiples of ", step, " (", alignment_bytes_, " bytes)");
    }
    if (!bucket.sparse && slot.offset > bucket.numel - slot.numel) {
      fail(describe(params_, slot.param), " starts at element ", slot.offset, " with ", slot.numel,
           " elements, past the end of bucket ", index, " of ", bucket.numel);
    }
  }

  void sparse(const BucketSpec& bucket, int64_t index) const {
    if (bucket.slots.size() != 1) {
      fail(describe(params_, bucket.slots[0].param), " is sparse but shares bucket ", index, " with ",
           describe(params_, bucket.slots[1].param));
    }
    if (bucket.numel != 0) {
      fail(describe(params_, bucket.slots[0].param), " is sparse but bucket ", index, " has flat memory of ",
           bucket.numel, " elements, expected 0");
    }
  }

  void overlap(const BucketSpec& bucket, int64_t index) const {
    std::vector<Slot> slots = bucket.slots;
    std::erase_if(slots, [](const Slot& slot) { return slot.numel == 0; });
    std::ranges::sort(slots, {}, &Slot::offset);
    for (size_t i = 1; i < slots.size(); ++i) {
      const Slot& before = slots[i - 1];
      if (before.offset + before.numel <= slots[i].offset) continue;
      fail(describe(params_, slots[i].param), " starts at element ", slots[i].offset, " of bucket ", index, ", inside ",
           describe(params_, before.param), ", which ends at ", before.offset + before.numel);
    }
  }

  std::span<const ParamSpec> params_;
  int64_t alignment_bytes_;
  std::vector<int64_t> bucket_of_;
};

}  // namespace

void check_plan(const BucketPlan& plan, std::span<const ParamSpec> params, int64_t alignment_bytes) {
  detail::check_params(params, alignment_bytes);
  PlanChecker checker(params, alignment_bytes);
  for (int64_t i = 0; i < std::ssize(plan.buckets); ++i) checker.bucket(plan.buckets[static_cast<size_t>(i)], i);
  checker.all_claimed();
}

}  // namespace torchddp::plan
