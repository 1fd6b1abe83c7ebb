// Bucket plans as pure functions: which gradient goes where in which flat bucket. No torch types.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace torchddp::plan {

// What a bucket plan needs to know about a parameter.
struct ParamSpec {
  std::string name;      // fully qualified, for messages
  int64_t numel = 0;     // elements of the gradient
  int64_t itemsize = 0;  // bytes of one element
  int32_t dtype = 0;     // opaque key: only parameters with equal dtype share a bucket
  int32_t device = 0;    // opaque key: only parameters with equal device share a bucket
  bool sparse = false;   // its gradient is sparse: a bucket of its own, without flat memory
  // The only rank that gets the average, or -1 for all ranks. Only parameters with equal owner share a bucket.
  int32_t owner = -1;
  // The slot begins at a multiple of this many bytes from the start of the bucket, zero-padded if necessary. 1, or anything
  // below the element size: directly behind the previous slot.
  int64_t alignment = 1;

  int64_t bytes() const { return numel * itemsize; }
};

// How large buckets may grow. A bucket closes as soon as its gradients' bytes reach its cap (so it may exceed the cap by
// its last gradient, as in torch, and by padding). The i-th bucket of one (dtype, device, owner) takes caps_bytes[i], the
// last cap repeating.
struct BucketLimits {
  std::vector<int64_t> caps_bytes;
  // Gradients of at least this size get a bucket each, which needs no packing (Note [Adopted gradients] in bucket/grad_slot.h).
  // 0: none.
  int64_t solo_bytes = 0;
};

struct Slot {
  int64_t param = 0;   // index into the parameters
  int64_t offset = 0;  // first element within the bucket
  int64_t numel = 0;
  bool operator==(const Slot&) const = default;
};

struct BucketSpec {
  std::vector<Slot> slots;
  int64_t numel = 0;  // elements of flat memory, padding included; 0 for a sparse bucket
  int64_t itemsize = 0;
  int32_t dtype = 0;
  int32_t device = 0;
  bool sparse = false;
  int32_t owner = -1;
  bool operator==(const BucketSpec&) const = default;
};

struct BucketPlan {
  std::vector<BucketSpec> buckets;  // in the order in which they are launched
  bool operator==(const BucketPlan&) const = default;
};

// Parameter indices of each bucket of a plan.
using BucketIndices = std::vector<std::vector<int64_t>>;

// `order` is the expected order in which gradients become ready, each parameter index exactly once. Buckets are sorted by the
// position of their last gradient in `order`, which is when each can start. Throws std::invalid_argument, saying what was got
// and what is allowed (no caps, a cap <= 0, an order that is not a permutation, numel < 0, itemsize <= 0, an alignment that is
// not a whole number of elements).
BucketPlan make_bucket_plan(std::span<const ParamSpec> params, std::span<const int64_t> order,
                            const BucketLimits& limits);

// The plan with these buckets. Throws std::invalid_argument naming parameter and bucket unless every parameter is in exactly one
// bucket, with others of its dtype, device and owner, or alone if it is sparse.
BucketPlan plan_of(const BucketIndices& buckets, std::span<const ParamSpec> params);

// The offset of parameters of at least this many bytes in buckets that leave them where they are; the other slots close the
// gap.
inline constexpr int64_t kInPlace = -1;
BucketSpec lay_in_place(BucketSpec bucket, std::span<const ParamSpec> params, int64_t bytes);

// Throws std::invalid_argument unless plan_of() would make this plan of its buckets.
void check_plan(const BucketPlan& plan, std::span<const ParamSpec> params);

// Completes `seen`, a prefix of a ready order (some parameters may never have become ready), in reverse registration order.
std::vector<int64_t> complete_order(std::vector<int64_t> seen, int64_t num_params);

// n-1, n-2, ..., 0: the guess before anything was measured (the last registered layer gets its gradient first).
inline std::vector<int64_t> reverse_registration_order(int64_t num_params) { return complete_order({}, num_params); }

// A plan as plain integers, so that rank 0's plan can be broadcast: the parameters' indices, bucket by bucket, with the first of
// each bucket inverted (~). As many as there are parameters, because receivers must allocate before they know the plan.
std::vector<int64_t> encode_plan(const BucketPlan& plan);
// Throws std::invalid_argument if the words do not encode a plan for these parameters.
BucketPlan decode_plan(std::span<const int64_t> words, std::span<const ParamSpec> params);

}  // namespace torchddp::plan
