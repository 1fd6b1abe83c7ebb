#include "transport/shm/operation_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

#include "transport/shm/shm_transport.h"

namespace torchddp::transport {
namespace {

at::Tensor over(std::byte* memory, const at::Tensor& like) {
  return at::from_blob(memory, like.sizes(), at::TensorOptions().dtype(like.scalar_type()));
}

// copy(tensor, its place in memory)
template <typename Copy>
void each_place(c10::ArrayRef<at::Tensor> tensors, std::byte* memory, Copy&& copy) {
  for (const auto& tensor : tensors) {
    if (tensor.numel() > 0) {
      copy(tensor, over(memory, tensor));
      memory += bytes_of(tensor);
    }
  }
}

}  // namespace

void OperationMemory::stage(ShmTransport& transport, c10::ArrayRef<at::Tensor> tensors) {
  staging = transport.scratch().lend(bytes_of(tensors), at::kCPU);
  auto* const memory = data_of(staging);
  if (tensors.size() == 1 && is_plain(tensors[0])) {
    transport.copier().copy(memory, tensors[0].const_data_ptr(), bytes_of(tensors));
  } else {
    pack(tensors, memory);
  }
}

void OperationMemory::deliver_to(std::vector<at::Tensor> tensors, at::Tensor memory) {
  deliver = [tensors = std::move(tensors), memory = std::move(memory)] {
    each_place(tensors, data_of(memory),
               [](const at::Tensor& tensor, const at::Tensor& place) { tensor.copy_(place); });
  };
}

at::Tensor private_bytes(int64_t bytes) { return at::empty({std::max<int64_t>(bytes, 1)}, at::kByte); }

int64_t bytes_of(c10::ArrayRef<at::Tensor> tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}

std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

void pack(c10::ArrayRef<at::Tensor> tensors, std::byte* memory) {
  each_place(tensors, memory, [](const at::Tensor& tensor, const at::Tensor& place) { place.copy_(tensor); });
}

}  // namespace torchddp::transport
