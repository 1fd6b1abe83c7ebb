#include "transport/transport.h"

#include <ATen/Functions.h>

#include "common/check.h"

namespace torchddp::transport {

at::Tensor Transport::lend(int64_t bytes, at::Device device) {
  return cache_.take(bytes, device, [&](int64_t rounded_up) { return allocate_scratch(rounded_up, device); });
}

at::Tensor Transport::allocate_scratch(int64_t bytes, at::Device device) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

void Transport::check_flat(const char* operation, const at::Tensor& tensor) const {
  TDDP_CHECK(tensor.defined() && (tensor.is_sparse() || tensor.is_contiguous()), operation, " on rank ", rank(),
             " needs a contiguous tensor");
}

void Transport::check_reduce_scatter(const at::Tensor& output, const at::Tensor& input) const {
  check_flat("reduce_scatter", input);
  check_flat("reduce_scatter", output);
  TDDP_CHECK(input.scalar_type() == output.scalar_type(), "reduce_scatter on rank ", rank(), ": input is ",
             input.scalar_type(), ", output ", output.scalar_type());
  TDDP_CHECK(input.numel() == output.numel() * size(), "reduce_scatter on rank ", rank(), ": input has ", input.numel(),
             " elements, expected output's ", output.numel(), " times the world size ", size());
}

void Transport::check_all_gather(const at::Tensor& output, const at::Tensor& input) const {
  check_flat("all_gather", input);
  check_flat("all_gather", output);
  TDDP_CHECK(input.scalar_type() == output.scalar_type(), "all_gather on rank ", rank(), ": input is ",
             input.scalar_type(), ", output ", output.scalar_type());
  TDDP_CHECK(output.numel() == input.numel() * size(), "all_gather on rank ", rank(), ": output has ", output.numel(),
             " elements, expected input's ", input.numel(), " times the world size ", size());
}

void Transport::check_rooted(const char* operation, const at::Tensor& tensor, int root) const {
  check_flat(operation, tensor);
  TDDP_CHECK(root >= 0 && root < size(), operation, " on rank ", rank(), ": root ", root, " is not in [0, ", size(),
             ")");
}

int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.is_sparse() ? tensor._indices().nbytes() + tensor._values().nbytes()
                                                 : tensor.nbytes());
}

std::shared_ptr<Transport> agree_on_memory(std::shared_ptr<Transport> transport, std::chrono::milliseconds timeout) {
  auto fallback = transport->fallback();
  if (fallback == nullptr) {
    return transport;
  }
  auto lost = at::full({1}, transport->lost_memory() ? 1 : 0, at::kInt);
  auto work = transport->make_work();
  transport->all_reduce(lost, *work);
  work->wait(timeout);
  return lost.item<int32_t>() == 0 ? transport : fallback;
}

}  // namespace torchddp::transport
