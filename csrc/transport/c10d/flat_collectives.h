// Collectives of c10d on flat tensors, whatever torch calls them.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace torchddp::transport {

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
                     std::vector<int64_t>& in_splits) {
  const c10d::AllToAllOptions options;
  if constexpr (requires { group.all_to_all_single(out, in, out_splits, in_splits, options); }) {
    return group.all_to_all_single(out, in, out_splits, in_splits, options);
  } else {
    return group.alltoall_base(out, in, out_splits, in_splits, options);
  }
}

}  // namespace torchddp::transport
