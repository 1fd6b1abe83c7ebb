// Operations of torch's process groups on flat tensors, across torch's renamings, and waits that another thread can end.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "common/signals.h"
#include "transport/interruption.h"

namespace torchddp::transport {

// Whether gloo handles the group's CPU tensors: torch can't abort its operations, and their futures complete on their own.
bool is_gloo(c10d::ProcessGroup& group);

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Runs `wait` for an operation of `group`, a process group or a backend (which may be null). If a signal handler ends it, the
// group is kept alive forever: gloo's destructor waits until its operations have ended, which would delay process exit for as
// long.
template <typename Group, typename Wait>
auto wait_or_keep(const c10::intrusive_ptr<Group>& group, Wait&& wait) {
  try {
    return wait();
  } catch (const SignalInterrupt&) {
    static_cast<void>(c10::intrusive_ptr<Group>(group).release());
    throw;
  }
}

// Like work.wait(timeout) for an operation of `group`, which is gloo's; throws TransportError when `interruption` is raised.
bool wait_interruptibly(c10d::Work& work, const GroupPtr& group, const Interruption& interruption,
                        std::chrono::milliseconds timeout = kNoTimeout);
// The same for any group (`interruptibly`: gloo's), and TransportError if the operation failed.
void wait_or_throw(c10d::Work& work, const GroupPtr& group, const Interruption& interruption, bool interruptibly,
                   std::chrono::milliseconds timeout = kNoTimeout);

// What starts while one lives captures no Python object of this thread. gloo's threads drop a work some time after its end,
// with the state captured at its start, in a backward pass a contextvars.Context. To drop that they take the GIL, which kills a
// process whose interpreter is shutting down by then; torch's own DDP ends so when a program leaves right after a backward.
class WithoutPythonObjects {
 public:
  WithoutPythonObjects() : kept_(Objects::get_state()) { Objects::set_state({}); }
  ~WithoutPythonObjects() { Objects::set_state(std::move(kept_)); }
  WithoutPythonObjects& operator=(WithoutPythonObjects&&) = delete;

 private:
  using Objects = at::impl::ThreadLocalPythonObjects;
  Objects kept_;
};

// What torch's error says, without its backtrace.
std::string reason_of(const std::exception& error);

// How long an operation of the group may take.
std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group, at::Device device);

// torch 2.13 renamed two collectives and deprecates the old names; 2.11 and 2.12 know only those.
template <typename Group>
auto reduce_scatter_flat(Group& group, at::Tensor& out, at::Tensor& in) {
  const c10d::ReduceScatterOptions options;
  if constexpr (requires { group.reduce_scatter_single(out, in, options); }) {
    return group.reduce_scatter_single(out, in, options);
  } else {
    return group._reduce_scatter_base(out, in, options);
  }
}

template <typename Group>
auto all_gather_flat(Group& group, at::Tensor& out, at::Tensor& in) {
  const c10d::AllgatherOptions options;
  if constexpr (requires { group.all_gather_single(out, in, options); }) {
    return group.all_gather_single(out, in, options);
  } else {
    return group._allgather_base(out, in, options);
  }
}

// Splits: elements for and from each rank, in rank order.
template <typename Group>
auto all_to_all_flat(Group& group, at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                     std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options = {}) {
  if constexpr (requires { group.all_to_all_single(out, in, out_splits, in_splits, options); }) {
    return group.all_to_all_single(out, in, out_splits, in_splits, options);
  } else {
    return group.alltoall_base(out, in, out_splits, in_splits, options);
  }
}

}  // namespace torchddp::transport
