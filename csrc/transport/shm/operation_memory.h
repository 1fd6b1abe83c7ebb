// The memory that an operation of the engine works on, from its start until no rank needs it any more.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "shm/operation.h"

namespace torchddp::transport {

class ShmTransport;

struct OperationMemory {
  at::Tensor input, output;       // what keeps it
  at::Tensor staging;             // of it, what the transport has lent for an input that the engine does not reach
  std::function<void()> deliver;  // the result to where it is wanted; may be empty

  // Copies the input, one tensor behind the other, to where the engine reaches it, after `lead_bytes` that are left free. Throws
  // TransportError if there is no room.
  void stage(ShmTransport& transport, c10::ArrayRef<at::Tensor> tensors, int64_t lead_bytes = 0);
  // The result, which will be in `memory`, is wanted in the tensors.
  void deliver_to(std::vector<at::Tensor> tensors, at::Tensor memory);
};

// An operation that moves bytes, whatever they are of.
inline shm::Operation of_bytes(shm::OpKind kind, int64_t bytes, int root = 0) {
  return {.kind = kind, .type = kernels::DType::kU8, .root = root, .numel = bytes};
}
// What is in memory is what is in the tensor.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}
// Private memory; also where there is nothing to put into it.
at::Tensor private_bytes(int64_t bytes);
int64_t bytes_of(c10::ArrayRef<at::Tensor> tensors);
std::byte* data_of(const at::Tensor& tensor);
// One tensor behind the other.
void pack(c10::ArrayRef<at::Tensor> tensors, std::byte* memory);

}  // namespace torchddp::transport
