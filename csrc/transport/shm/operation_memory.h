// The memory of an engine operation, from its start until no rank needs it any more.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "shm/operation.h"

namespace torchddp::transport {

class ShmTransport;

struct OperationMemory {
  at::Tensor input, output;       // what keeps it
  at::Tensor staging;             // the part lent by the transport for an input that the engine can't reach
  std::function<void()> deliver;  // moves the result to its destination; may be empty

  // Copies the input, one tensor after the other, to where the engine reaches it. Throws TransportError if there is no room.
  void stage(ShmTransport& transport, c10::ArrayRef<at::Tensor> tensors);
  // The result, which will be in `memory`, goes to the tensors.
  void deliver_to(std::vector<at::Tensor> tensors, at::Tensor memory);
};

// An operation that moves bytes, whatever they represent.
inline shm::Operation of_bytes(shm::OpKind kind, int64_t bytes, int root = 0) {
  return {.kind = kind, .type = kernels::DType::kU8, .root = root, .numel = bytes};
}
// Whether the tensor's memory holds its values as they are.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}
// Private memory; also used when it is empty.
at::Tensor private_bytes(int64_t bytes);
int64_t bytes_of(c10::ArrayRef<at::Tensor> tensors);
std::byte* data_of(const at::Tensor& tensor);
// One tensor after the other.
void pack(c10::ArrayRef<at::Tensor> tensors, std::byte* memory);

}  // namespace torchddp::transport
