#include "transport/transport.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "common/check.h"

namespace torchddp::transport {

const char* Collective::name() const {
  constexpr const char* kNames[] = {"all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"};
  return kNames[static_cast<size_t>(kind)];
}

at::Tensor Transport::allocate(int64_t numel, at::ScalarType dtype, at::Device device) {
  return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
}

at::Tensor Transport::allocate_scratch(int64_t bytes, at::Device device) {
  return Transport::allocate(bytes, at::kByte, device);
}

void Transport::check_arguments(const Collective& operation) const {
  const auto* const name = operation.name();
  const auto& [kind, output, input, root, options, in_place] = operation;
  for (const auto* tensor : {&input, &output}) {
    TDDP_CHECK(tensor->defined() && (tensor->is_sparse() || tensor->is_contiguous()), name, " on rank ", rank(),
               " needs a contiguous tensor");
  }
  TDDP_INTERNAL(in_place.tensors.empty() || capabilities_.sums_in_place, name, " through ", this->name(),
                " takes no further tensors in place");
  for (const auto& tensor : in_place.tensors) {
    TDDP_INTERNAL(tensor.is_contiguous() && tensor.scalar_type() == input.scalar_type(), name,
                  " takes contiguous tensors of one dtype in place");
  }
  TDDP_CHECK(input.scalar_type() == output.scalar_type(), name, " on rank ", rank(), ": input is ", input.scalar_type(),
             ", output ", output.scalar_type());
  TDDP_CHECK(kind != Collective::Kind::kReduceScatter || input.numel() == output.numel() * size(), name, " on rank ",
             rank(), ": input has ", input.numel(), " elements, expected output's ", output.numel(),
             " times the world size ", size());
  TDDP_CHECK(kind != Collective::Kind::kAllGather || output.numel() == input.numel() * size(), name, " on rank ",
             rank(), ": output has ", output.numel(), " elements, expected input's ", input.numel(),
             " times the world size ", size());
  TDDP_CHECK(root >= 0 && root < size(), name, " on rank ", rank(), ": root ", root, " is not in [0, ", size(), ")");
  const bool may_narrow = capabilities_.narrows && kind == Collective::Kind::kAllReduce;
  TDDP_INTERNAL((options.scale == 1.0 || capabilities_.scales) && (!options.outer_dtype || may_narrow), name,
                " can't scale or narrow so through ", this->name());
}

void Transport::start(const Collective& operation, Work& work) {
  using Kind = Collective::Kind;
  const bool is_barrier = operation.kind == Kind::kBarrier;
  if (!is_barrier) check_arguments(operation);
  launch(operation, work);
  if (is_barrier || !capabilities_.is_network) return;
  auto bytes = std::max(bytes_of(operation.input), bytes_of(operation.output));
  for (const auto& tensor : operation.in_place.tensors) bytes += bytes_of(tensor);
  auto on_wire = one_way_bytes(bytes, size());
  if (operation.kind == Kind::kAllReduce) {
    on_wire = operation.input.is_sparse() ? (size() - 1) * bytes : all_reduce_bytes(bytes, size());
  } else if (operation.kind == Kind::kReduce) {
    on_wire = reduce_bytes(bytes, rank() == operation.root);
  }
  count(route_, bytes, on_wire);
}

int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.is_sparse() ? tensor._indices().nbytes() + tensor._values().nbytes()
                                                 : tensor.nbytes());
}

std::shared_ptr<Transport> agree_on_memory(std::shared_ptr<Transport> transport, std::chrono::milliseconds timeout) {
  auto fallback = transport->fallback();
  if (fallback == nullptr) return transport;
  const auto lost = at::full({1}, transport->has_lost_memory() ? 1 : 0, at::kLong);
  const auto work = transport->make_work();
  transport->start(Collective::all_reduce(lost), *work);
  work->wait(timeout);
  return lost.item<int64_t>() == 0 ? transport : fallback;
}

}  // namespace torchddp::transport
