// The calls of NCCL that we make, as a table: a test puts a recording one in its place, which also injects errors.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "gpu/device.h"
#include "kernels/dtype.h"

namespace torchddp::gpu {

using Comm = void*;    // ncclComm_t
using Window = void*;  // ncclWindow_t

struct UniqueId {
  std::array<char, 128> bytes{};
};

// ncclResult_t, of which we only tell these apart.
inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclInProgress = 7;

// Symmetric memory windows exist from here on (2.27).
inline constexpr int kWindowsVersion = 22700;

// Methods mirror NCCL's functions and return its result codes; a communicator is non-blocking, so that each may return
// kNcclInProgress. Not thread-safe per communicator. NCCL knows all types but kI16.
class Nccl {
 public:
  virtual ~Nccl() = default;

  // MAJOR * 10000 + MINOR * 100 + PATCH of the library that is loaded, and of the header that we were compiled with.
  virtual int version() = 0;
  virtual int built_version() const = 0;
  // The library's words for a result, with what it logged last for `comm` (may be null).
  virtual std::string describe(int result, Comm comm) = 0;

  virtual int make_id(UniqueId* id) = 0;
  virtual int init_rank(Comm* comm, int size, const UniqueId& id, int rank) = 0;
  virtual int async_error(Comm comm, int* error) = 0;
  virtual int finalize(Comm comm) = 0;
  virtual int destroy(Comm comm) = 0;
  virtual int abort(Comm comm) = 0;

  virtual int memory_alloc(void** memory, int64_t bytes) = 0;
  virtual int memory_free(void* memory) = 0;
  // Collective: equal sizes, in the same order on all ranks. `window` stays null where the hardware has no use for it.
  virtual int window_register(Comm comm, void* memory, int64_t bytes, Window* window) = 0;
  virtual int window_deregister(Comm comm, Window window) = 0;

  virtual int all_reduce(const void* input, void* output, int64_t numel, kernels::DType type, Comm comm,
                         Stream stream) = 0;
  // In place.
  virtual int reduce(void* data, int64_t numel, kernels::DType type, int root, Comm comm, Stream stream) = 0;
  virtual int reduce_scatter(const void* input, void* output, int64_t output_numel, kernels::DType type, Comm comm,
                             Stream stream) = 0;
  virtual int all_gather(const void* input, void* output, int64_t input_numel, kernels::DType type, Comm comm,
                         Stream stream) = 0;
  virtual int broadcast(void* data, int64_t numel, kernels::DType type, int root, Comm comm, Stream stream) = 0;
};

// Why the library that is loaded can't be used by an extension compiled with `built`; empty if it can.
std::string version_problem(int running, int built);

}  // namespace torchddp::gpu
