// Collectives on flat memory. One implementation per way of moving bytes; see tests/distributed/test_transport.py for the
// conformance test that each must pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/interruption.h"
#include "transport/memory_cache.h"
#include "transport/traffic.h"
#include "transport/work.h"

namespace torchddp::transport {

struct SumOptions {
  // Other than 1 only for fp32 and fp64, and if the transport scales; ranks may differ in it. For all_reduce and reduce.
  double scale = 1.0;
  // fp32 tensors may travel as kBFloat16 or kHalf, and are summed in fp32. Only if the transport narrows; equal on all ranks. Ranks
  // get equal results. For all_reduce alone.
  std::optional<at::ScalarType> wire;
  // What errors call it, where the operation itself is all that is left to tell of: -1 is no bucket.
  int64_t bucket = -1;
  // Work::non_finite() tells of this rank's own input, Work::sums_finite() of the result. For all_reduce alone, and only if
  // Transport::counts_non_finite(); ranks may differ.
  bool count_non_finite = false;
};

// More tensors for an all_reduce, each where it lies: the sum over ranks of tensor * scale, in place. Floating point, one dtype, as many and
// of the same sizes on all ranks, which may differ in the scale. Only if the transport sums_alongside.
struct Alongside {
  std::span<const at::Tensor> tensors = {};  // until start() returns
  double scale = 1.0;
};

// An operation of all ranks.
struct Collective {
  enum class Kind : uint8_t { kAllReduce, kReduce, kReduceScatter, kAllGather, kBroadcast, kBarrier };

  // In place: the sum over ranks of tensor * options.scale. With others alongside it may be empty.
  static Collective all_reduce(const at::Tensor& tensor, const SumOptions& options = {}, const Alongside& others = {}) {
    return {Kind::kAllReduce, tensor, tensor, 0, options, others};
  }
  // In place on rank `root`: the sum over ranks of tensor * options.scale. On the others the values are unspecified afterwards.
  static Collective reduce(const at::Tensor& tensor, int root, const SumOptions& options = {}) {
    return {Kind::kReduce, tensor, tensor, root, options};
  }
  // output[numel / size()] = this rank's part of the sum of input[numel]; numel must be a multiple of size().
  static Collective reduce_scatter(const at::Tensor& output, const at::Tensor& input) {
    return {Kind::kReduceScatter, output, input};
  }
  // output[numel * size()] = every rank's input[numel], in rank order.
  static Collective all_gather(const at::Tensor& output, const at::Tensor& input) {
    return {Kind::kAllGather, output, input};
  }
  // In place: rank `root`'s values.
  static Collective broadcast(const at::Tensor& tensor, int root) { return {Kind::kBroadcast, tensor, tensor, root}; }
  // Complete when every rank has started it.
  static Collective barrier() { return {}; }

  const char* name() const;

  Kind kind = Kind::kBarrier;
  at::Tensor output = {}, input = {};
  int root = 0;
  SumOptions options = {};
  Alongside others = {};
};

struct Capabilities {
  // Collectives work on any memory as well as on allocate()'s.
  bool reaches_any_memory = true;
  // Sums scale fp32 and fp64 on the way, for less than a pass over memory.
  bool scales = false;
  // all_reduce can send fp32 in 16 bits.
  bool narrows = false;
  // all_reduce takes tensors alongside, and scales them for less than a pass over memory.
  bool sums_alongside = false;
  bool scales_alongside = false;
  // What operations put on the wire follows from Note [Bytes on the wire]; otherwise launch() counts.
  bool is_network = true;
};

// Operations are collective: every rank starts them in the same order with equal shapes and dtypes. start() returns at once; the
// tensors must stay unchanged until Work::wait() returned. Calls come from one thread at a time.
class Transport {
 public:
  virtual ~Transport() = default;

  const char* name() const { return kRouteNames[static_cast<size_t>(route_)]; }
  virtual int rank() const = 0;
  virtual int size() const = 0;
  const Capabilities& capabilities() const { return capabilities_; }

  // Flat memory that this transport reaches without another copy. Contents are unspecified.
  virtual at::Tensor allocate(int64_t numel, at::ScalarType dtype, at::Device device);
  // The same for bytes that are needed for an operation or a step only: lent again when the last tensor over them is gone. Throws
  // TransportError if there is no room.
  MemoryCache& scratch() { return scratch_; }
  // Whether collectives work on this CPU memory without copying it.
  virtual bool reaches(const at::Tensor& /*tensor*/) const { return true; }

  virtual std::unique_ptr<Work> make_work() = 0;
  void start(const Collective& operation, Work& work);
  // Whether all_reduce of this tensor, not narrowed, counts infinities and NaNs on the way, for less than a pass over memory.
  virtual bool counts_non_finite(const at::Tensor& /*tensor*/) const { return false; }
  // Of all operations since the transport was made.
  virtual Traffic traffic() const { return counter_.read(); }

  // Throws TransportError if an operation failed after it had been waited for: where results are only queued, it may. Costs next to
  // nothing.
  virtual void check() {}

  // From any thread, not collective: waits under way and all later operations here throw TransportError(reason), those of the peers
  // soon, where they can be told. Does not wait. The transport is of no use any more.
  virtual void interrupt(const std::string& reason) { interruption_.raise(reason); }
  // For waits outside of the transport that must end with it.
  const Interruption& interruption() const { return interruption_; }

  // Does what can be done for the operations under way, without waiting. For transports whose ranks do the work themselves: called
  // from every autograd hook, from several threads, so it must cost next to nothing when there is nothing to do, and may do
  // nothing where it did something a moment ago.
  virtual void progress() {}

  // For transports that do not reach any memory: the gradients that a bucket each waits for, by size in bytes. Between
  // begin_backward and end_backward the transport may let torch allocate tensors of such sizes where it reaches them, so that
  // those gradients need not be copied.
  virtual void expect_gradients(std::span<const int64_t> sizes) { static_cast<void>(sizes); }
  virtual void begin_backward() {}
  virtual void end_backward() {}

  // For transports that can't always get, or use, the memory that they want; see agree_on_memory. Where ranks say different numbers, or
  // one says 0, for it has had to give memory that its peers don't reach, all go on with fallback(). Null where that can't happen.
  virtual std::shared_ptr<Transport> fallback() const { return nullptr; }
  virtual int64_t memory_state() { return 1; }
  // Collective, where all ranks have said the same.
  virtual void commit_memory() {}
  // Where small messages start that are for the host.
  virtual at::Device message_device() const { return at::kCPU; }

 protected:
  explicit Transport(Route route, Capabilities capabilities = {}) : route_(route), capabilities_(capabilities) {}

  // As start(), which has checked the arguments, and counts what they put on a network.
  virtual void launch(const Collective& operation, Work& work) = 0;
  // New memory for scratch().
  virtual at::Tensor allocate_scratch(int64_t bytes, at::Device device);
  void count(Route route, int64_t payload_bytes, int64_t wire_bytes) { counter_.add(route, payload_bytes, wire_bytes); }

 private:
  void check_arguments(const Collective& operation) const;

  const Route route_;
  const Capabilities capabilities_;
  MemoryCache scratch_{[this](int64_t bytes, at::Device device) { return allocate_scratch(bytes, device); }};
  Interruption interruption_;
  TrafficCounter counter_;
};

// Of a sparse tensor: its indices and values.
int64_t bytes_of(const at::Tensor& tensor);

// Collective if the transport has a fallback, otherwise nothing. `transport`, with its memory as it wants it, or on all ranks its
// fallback.
std::shared_ptr<Transport> agree_on_memory(std::shared_ptr<Transport> transport, std::chrono::milliseconds timeout);

}  // namespace torchddp::transport
