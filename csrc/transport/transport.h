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
  // Other than 1 only if Transport::scales(); ranks may differ in it. For all_reduce and reduce.
  double scale = 1.0;
  // fp32 tensors may travel as kBFloat16 or kHalf, and are summed in fp32. Only if Transport::narrows(); equal on all ranks. Ranks
  // get equal results. For all_reduce alone.
  std::optional<at::ScalarType> wire;
  // What errors call it, where the operation itself is all that is left to tell of: -1 is no bucket.
  int64_t bucket = -1;
  // Work::non_finite() tells of this rank's own input, Work::sums_finite() of the result. For all_reduce alone, and only if
  // Transport::counts_non_finite(); ranks may differ.
  bool count_non_finite = false;
};

// All operations are collective: every rank calls them in the same order with equal shapes and dtypes. They start the
// operation and return; the tensors must stay unchanged until Work::wait() returned. Calls come from one thread at a time.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Flat memory that this transport reaches without another copy. Contents are unspecified.
  virtual at::Tensor allocate(int64_t numel, at::ScalarType dtype, at::Device device) = 0;
  // The same for bytes (1-d, kByte, at least as many as asked for) that are needed for an operation or a step only. They are lent again
  // when the last tensor over them is gone. Throws TransportError if there is no room.
  at::Tensor lend(int64_t bytes, at::Device device);
  // Lent, and kept to be lent.
  int64_t lent_bytes() const { return cache_.bytes(); }
  // Lets go of what is kept to be lent, but for so many blocks; whether there was anything.
  bool trim_lent(size_t blocks) { return cache_.trim(blocks); }
  virtual std::unique_ptr<Work> make_work() = 0;
  // Whether collectives work on any memory as well as on allocate()'s.
  virtual bool reaches_any_memory() const = 0;
  // Whether they work on this memory without copying it.
  virtual bool reaches(const at::Tensor& tensor) const = 0;
  // Whether sums scale tensors of this dtype on the way, for less than a pass over memory.
  virtual bool scales(at::ScalarType dtype) const = 0;
  // Whether all_reduce can send fp32 in 16 bits.
  virtual bool narrows() const { return false; }
  // Whether all_reduce of this tensor, not narrowed, counts infinities and NaNs on the way, for less than a pass over memory.
  virtual bool counts_non_finite(const at::Tensor& /*tensor*/) const { return false; }

  // In place: the sum over ranks of tensor * options.scale.
  virtual void all_reduce(const at::Tensor& tensor, Work& work, const SumOptions& options) = 0;
  void all_reduce(const at::Tensor& tensor, Work& work) { all_reduce(tensor, work, SumOptions()); }
  // In place on rank `root`: the sum over ranks of tensor * options.scale. On the others the values are unspecified afterwards.
  virtual void reduce(const at::Tensor& tensor, int root, Work& work, const SumOptions& options) = 0;
  void reduce(const at::Tensor& tensor, int root, Work& work) { reduce(tensor, root, work, SumOptions()); }
  // output[numel / size()] = this rank's part of the sum of input[numel]; numel must be a multiple of size().
  virtual void reduce_scatter(const at::Tensor& output, const at::Tensor& input, Work& work) = 0;
  // output[numel * size()] = every rank's input[numel], in rank order.
  virtual void all_gather(const at::Tensor& output, const at::Tensor& input, Work& work) = 0;
  // In place: rank `root`'s values.
  virtual void broadcast(const at::Tensor& tensor, int root, Work& work) = 0;
  // Complete when every rank has started it.
  virtual void barrier(Work& work) = 0;

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
  // from every autograd hook, from several threads, so it must cost next to nothing when there is nothing to do.
  virtual void progress() {}

  // For transports that do not reach any memory: the gradients that a bucket each waits for, by size in bytes. Between
  // begin_backward and end_backward the transport may let torch allocate tensors of such sizes where it reaches them, so that
  // those gradients need not be copied.
  virtual void expect_gradients(std::span<const int64_t> sizes) { static_cast<void>(sizes); }
  virtual void begin_backward() {}
  virtual void end_backward() {}

  // Whether allocate() has had to give memory that collectives reach only by copying. All ranks must then agree to go on with
  // fallback(), see agree_on_memory; null where that can't happen.
  virtual bool lost_memory() const { return false; }
  virtual std::shared_ptr<Transport> fallback() const { return nullptr; }

 protected:
  void check_flat(const char* operation, const at::Tensor& tensor) const;
  void check_reduce_scatter(const at::Tensor& output, const at::Tensor& input) const;
  void check_all_gather(const at::Tensor& output, const at::Tensor& input) const;
  void check_rooted(const char* operation, const at::Tensor& tensor, int root) const;
  // An operation was started; see Note [Bytes on the wire] in traffic.h.
  void count(Route route, int64_t payload_bytes, int64_t wire_bytes) { counter_.add(route, payload_bytes, wire_bytes); }
  // New memory for lend().
  virtual at::Tensor allocate_scratch(int64_t bytes, at::Device device);

 private:
  MemoryCache cache_;
  Interruption interruption_;
  TrafficCounter counter_;
};

// Of a sparse tensor: its indices and values.
int64_t bytes_of(const at::Tensor& tensor);

// Collective if the transport has a fallback, otherwise nothing. `transport`, or its fallback on all ranks if any rank has lost some.
std::shared_ptr<Transport> agree_on_memory(std::shared_ptr<Transport> transport, std::chrono::milliseconds timeout);

}  // namespace torchddp::transport
