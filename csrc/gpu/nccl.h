// The NCCL calls we make, as an interface: tests replace it with a recording one that also injects errors.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "kernels/dtype.h"

namespace torchddp::gpu {

using Comm = void*;  // ncclComm_t

// ncclRedOp_t: the sum, or one made by make_pre_mul_sum().
using SumOp = int;
inline constexpr SumOp kPlainSum = 0;

struct UniqueId {
  std::array<char, 128> bytes{};
};

// ncclResult_t values, of which we only distinguish these.
inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclInProgress = 7;

// User settings for a communicator, by the names of torch's ncclConfig_t fields.
struct CommSettings {
  std::map<std::string, int> numbers;
  std::string net_name;  // empty: NCCL's choice
};

// Methods mirror NCCL's functions and return its result codes. Calls for a communicator block unless its settings or the
// environment (NCCL_COMM_BLOCKING) say otherwise; then each may return kNcclInProgress. One call at a time per communicator,
// except that abort() may come while another call is inside, which then returns. NCCL supports all types except kI16.
class Nccl {
 public:
  virtual ~Nccl() = default;

  // MAJOR * 10000 + MINOR * 100 + PATCH of the loaded library, and of the header we were compiled with.
  virtual int version() = 0;
  virtual int built_version() const = 0;
  // The library's description of a result, with its last log message for `comm` (may be null).
  virtual std::string describe(int result, Comm comm) = 0;

  virtual int make_id(UniqueId* id) = 0;
  // Those of CommSettings::numbers that this build can set.
  virtual std::vector<std::string> known_numbers() const = 0;
  // NCCL may write to `comm` until nothing is in progress.
  virtual int init_rank(Comm* comm, int size, const UniqueId& id, int rank, const CommSettings& settings) = 0;
  virtual int async_error(Comm comm, int* error) = 0;
  virtual int finalize(Comm comm) = 0;
  virtual int destroy(Comm comm) = 0;
  virtual int abort(Comm comm) = 0;

  // Calls between the two are launched together; group_end returns the error of any of them.
  virtual int group_start() = 0;
  virtual int group_end() = 0;
  // A sum of each rank's values times its `scale`, rounded to `type`, which is floating point. Destroy it after the last call
  // that uses it has returned.
  virtual int make_pre_mul_sum(SumOp* op, double scale, kernels::DType type, Comm comm) = 0;
  virtual int destroy_op(SumOp op, Comm comm) = 0;

  virtual int all_reduce(const void* input, void* output, int64_t numel, kernels::DType type, SumOp op, Comm comm,
                         Stream stream) = 0;
  // In place.
  virtual int reduce(void* data, int64_t numel, kernels::DType type, int root, Comm comm, Stream stream) = 0;
  virtual int reduce_scatter(const void* input, void* output, int64_t output_numel, kernels::DType type, Comm comm,
                             Stream stream) = 0;
  virtual int all_gather(const void* input, void* output, int64_t input_numel, kernels::DType type, Comm comm,
                         Stream stream) = 0;
  virtual int broadcast(void* data, int64_t numel, kernels::DType type, int root, Comm comm, Stream stream) = 0;
};

// Why the loaded library can't be used by an extension compiled with `built`; empty if it can.
std::string version_problem(int running, int built);

struct Memory {
  void* data;
  int64_t numel;
};

// In place: the sum of `packed`, which may be empty, and of each other tensor times `scale`, rounded to `type`. NCCL scales
// while it reads, which costs almost nothing, but its NVLink SHARP algorithms support plain sums only. The
// kind of sum must not depend on the scale, in which ranks may differ, because NCCL could then choose different algorithms.
// Without peers (`size` 1) it may.
int all_reduce_together(Nccl& nccl, Comm comm, Stream stream, kernels::DType type, const Memory& packed,
                        std::span<const Memory> in_place, double scale, int size);

// Whether NCCL may multiply values of `type` by `scale`, which it rounds to that type. (torch forms the product in float.)
bool can_scale_by(kernels::DType type, double scale);

}  // namespace torchddp::gpu
