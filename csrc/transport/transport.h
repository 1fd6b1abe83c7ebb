// Collectives on flat memory. One implementation per way of moving bytes; see tests/distributed/test_transport.py for the
// conformance test that each must pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "common/check.h"
#include "transport/interruption.h"
#include "transport/memory_cache.h"
#include "transport/traffic.h"

namespace torchddp::transport {

// Wait for as long as the transport's own time limit allows (for c10d: the process group's timeout).
inline constexpr std::chrono::milliseconds kTransportTimeout{0};

// A Work is created once (Transport::make_work) and reused by every collective it is passed to, so that a steady training step
// allocates nothing. One collective at a time; not thread-safe.
class Work {
 public:
  virtual ~Work() = default;
  Work() = default;
  Work& operator=(Work&&) = delete;

  // True when nothing is in flight: finished, failed (then wait() throws), or never started. Never blocks.
  virtual bool poll() = 0;

  // Blocks until the result may be used: by the host for CPU tensors, by work queued on the current stream for CUDA tensors.
  // Throws TransportError when a peer is gone or `timeout` has passed. Returns at once if idle.
  virtual void wait(std::chrono::milliseconds timeout = kTransportTimeout) = 0;

  // The number of infinities and NaNs in this rank's input to the last operation waited for, if SumOptions::count_non_finite
  // was set.
  virtual int64_t non_finite() const { return 0; }
  // Then also: whether its result is known to contain neither. False if it was not checked.
  virtual bool sums_finite() const { return false; }
  // Forgets a failed operation; the memory it used stays alive for as long as the backend may still write to it.
  virtual void abandon() = 0;
};

struct SumOptions {
  // Other than 1 only for fp32 and fp64, and only if the transport scales; ranks may differ. For all_reduce and reduce.
  double scale = 1.0;
  // Between hosts, fp32 tensors are sent as kBFloat16 or kHalf and are summed in fp32; within a host, nothing changes. Only if
  // the transport narrows; equal on all ranks, which get equal results. For all_reduce only.
  std::optional<at::ScalarType> outer_dtype = std::nullopt;
  // How errors refer to it if the operation is all that is left to name; -1: not a bucket.
  int64_t bucket = -1;
  // Work::non_finite() then reports this rank's own input, and Work::sums_finite() the result. For all_reduce only, and only if
  // Transport::counts_non_finite(); ranks may differ.
  bool count_non_finite = false;
};

// More tensors for an all_reduce: each becomes the sum over ranks of tensor * scale, in place. Floating point, one
// dtype, the same number and sizes on all ranks, which may differ in the scale. Only if the transport sums_in_place.
struct InPlace {
  std::span<const at::Tensor> tensors = {};  // until start() returns
  double scale = 1.0;
};

// An operation of all ranks.
struct Collective {
  enum class Kind : uint8_t { kAllReduce, kReduce, kReduceScatter, kAllGather, kBroadcast, kBarrier };

  // In place: the sum over ranks of tensor * options.scale. May be empty if there are others in place.
  static Collective all_reduce(const at::Tensor& tensor, const SumOptions& options = {}, const InPlace& in_place = {}) {
    return {Kind::kAllReduce, tensor, tensor, 0, options, in_place};
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
  InPlace in_place = {};
};

struct Capabilities {
  // Collectives work on any memory as well as on allocate()'s.
  bool reaches_any_memory = true;
  // Sums scale fp32 and fp64 on the way, for less than a pass over memory.
  bool scales = false;
  // all_reduce can send fp32 in 16 bits.
  bool narrows = false;
  // all_reduce takes further tensors in place, and scales them for less than a pass over memory.
  bool sums_in_place = false;
  bool scales_in_place = false;
  // The bytes on the wire follow from Note [Bytes on the wire]; otherwise launch() counts them.
  bool is_network = true;
};

// Operations are collective: every rank starts them in the same order with equal shapes and dtypes. start() returns at once;
// the tensors must stay unchanged until Work::wait() has returned. Called by one thread at a time.
class Transport {
 public:
  virtual ~Transport() = default;

  const char* name() const { return kRouteNames[static_cast<size_t>(route_)]; }
  virtual int rank() const = 0;
  virtual int size() const = 0;
  const Capabilities& capabilities() const { return capabilities_; }

  // Flat memory that this transport reaches without a copy. The contents are unspecified.
  virtual at::Tensor allocate(int64_t numel, at::ScalarType dtype, at::Device device);
  // The same for memory needed for one operation or step only: reused once the last tensor over it is gone. Throws
  // TransportError if there is no room.
  MemoryCache& scratch() { return scratch_; }
  // Whether collectives work on this CPU memory without copying it.
  virtual bool reaches(const at::Tensor& /*tensor*/) const { return true; }

  virtual std::unique_ptr<Work> make_work() = 0;
  void start(const Collective& operation, Work& work);
  // Whether an all_reduce of this tensor, not narrowed, also counts infinities and NaNs for less than a pass over memory.
  virtual bool counts_non_finite(const at::Tensor& /*tensor*/) const { return false; }
  // Of all operations since the transport was created.
  virtual Traffic traffic() const { return counter_.read(); }

  // Throws TransportError if an operation failed after it was waited for, which is possible where results are only queued.
  // Costs almost nothing.
  virtual void check() {}

  // Thread-safe, not collective: current waits and all later operations here throw TransportError(reason), and soon those of
  // the peers that can be told. Does not wait. The transport can't be used afterwards.
  virtual void interrupt(const std::string& reason) { interruption_.raise(reason); }
  // For waits outside of the transport that must end with it.
  const Interruption& interruption() const { return interruption_; }

  // Makes progress on operations in flight without waiting. For transports whose ranks do the work themselves: every autograd
  // hook calls it, from several threads, so it must cost almost nothing when there is nothing to do, and may skip if it ran a
  // moment ago.
  virtual void progress() {}

  // For transports that can't reach any memory: the sizes in bytes of the gradients that have a bucket each. Between
  // begin_backward and end_backward the transport may let torch allocate tensors of these sizes in its own memory, so that
  // those gradients need not be copied.
  virtual void expect_gradients(std::span<const int64_t> sizes) { static_cast<void>(sizes); }
  virtual void begin_backward() {}
  virtual void end_backward() {}
  // After a step: frees memory that it holds for such gradients, except this much.
  virtual void trim_gradients(int64_t bytes) { static_cast<void>(bytes); }

  // For transports that can't always get the memory they want; see agree_on_memory. If a rank had to hand out memory that its
  // peers can't reach, all continue with fallback(). Null if that can't happen.
  virtual std::shared_ptr<Transport> fallback() const { return nullptr; }
  virtual bool has_lost_memory() const { return false; }

 protected:
  explicit Transport(Route route, Capabilities capabilities = {}) : route_(route), capabilities_(capabilities) {}

  // Like start(), which has already checked the arguments and counts the bytes for networks.
  virtual void launch(const Collective& operation, Work& work) = 0;
  // New memory for scratch().
  virtual at::Tensor allocate_scratch(int64_t bytes, at::Device device);
  // The Work as this transport has made it.
  template <typename Made>
  Made& own(Work& work) const {
    auto* const made = dynamic_cast<Made*>(&work);
    TDDP_INTERNAL(made != nullptr, "a Work of another transport was given to ", name());
    return *made;
  }
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

// Collective if the transport has a fallback, otherwise does nothing. Returns `transport` with its preferred memory, or its
// fallback on all ranks.
std::shared_ptr<Transport> agree_on_memory(std::shared_ptr<Transport> transport, std::chrono::milliseconds timeout);

}  // namespace torchddp::transport
